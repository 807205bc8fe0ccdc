"""A small convnet trained from files, beside the same data resident on the device.

One process for each size. First the loader alone feeds the training: that gives the peak of VRAM. Then the whole data
set is put on the device, and rounds of both take turns, the same number of steps each, so that a clock of the GPU that
drifts hits both. The resident side gathers the rows of the same order by index, on the device; its indices are there
beforehand. Beside the time of a step stands what asking for the batch took of it, on the thread that launches work:
where the GPU waits for that thread, the difference of the two is the overhead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stormtorch.data.loader import DataLoader
from stormtorch.data.readers.file_windows import READ_THREADS
from stormtorch.data.readers.order import WINDOW_BYTES

from .cases import Case
from .convnet import Trainer
from .disk import read_rate
from .flat import DISK_SECONDS
from .made import labels_file, shard_files
from .resident import Batch, Resident, room_for
from .timing import peak_rss_bytes

_WARM_STEPS = 20
_ROUNDS = 4  # pairs


def measure(case: Case) -> dict[str, Any]:
    device = torch.device(case.device)
    reading = "direct" if case.method == "train-direct" else "cached"
    if device.type == "cpu":
        torch.set_num_threads(1)  # shows that it runs: threads that spin for each other take seconds to do so
    trainer = Trainer(case.width, device)
    with _loader(case, reading=reading, shuffle=True) as loader:
        stream = _stream(loader)
        _run(trainer, stream, _WARM_STEPS, device)
        warm_s = _run(trainer, stream, _WARM_STEPS, device).all_s / _WARM_STEPS
        steps = max(_WARM_STEPS, int(case.seconds / (2 * _ROUNDS) / warm_s))
        _run(trainer, stream, steps, device)
        figures: dict[str, Any] = {"reading": reading, "rss_bytes": peak_rss_bytes(), **_vram(device)}
        streams: dict[str, Iterator[Batch]] = {"ours": stream}
        if reading == "cached":
            figures["note"] = room_for(case.total_bytes, device)
            if not figures["note"]:
                with _loader(case, reading="cached", shuffle=False) as ordered:
                    streams["resident"] = Resident(ordered, loader, steps * _ROUNDS).stream()
                _run(trainer, streams["resident"], _WARM_STEPS, device)
        waited = loader.report().waited_s
        times: dict[str, list[float]] = {name: [] for name in streams}
        asking: dict[str, list[float]] = {name: [] for name in streams}
        for _ in range(_ROUNDS):
            for name, batches in streams.items():
                spent = _run(trainer, batches, steps, device)
                times[name].append(spent.all_s / steps / case.batch)
                asking[name].append(spent.asking_s / steps)
        figures["waited"] = (loader.report().waited_s - waited) / (sum(times["ours"]) * steps * case.batch)
        figures["sample_s"] = statistics.median(times["ours"])
        figures["asking_s"] = statistics.median(asking["ours"])
        if "resident" in times:
            figures["resident_sample_s"] = statistics.median(times["resident"])
            figures["resident_asking_s"] = statistics.median(asking["resident"])
            figures["overhead"] = figures["sample_s"] / figures["resident_sample_s"] - 1
        figures["loss"] = float(trainer.loss)
        figures |= _alone(case, stream, device) if reading == "cached" else _alone_with_disk(case, stream, device)
        stream.close()
    return {**figures, "times": times}


def _alone(case: Case, stream: Iterator[Batch], device: torch.device) -> dict[str, float]:
    """The loader without training, for about a quarter of the case's time."""
    warm_s = _run(None, stream, _WARM_STEPS, device).all_s / _WARM_STEPS
    steps = max(_WARM_STEPS, int(case.seconds / 4 / warm_s))
    return {"alone_rate": case.batch * steps / _run(None, stream, steps, device).all_s}


def _alone_with_disk(case: Case, stream: Iterator[Batch], device: torch.device) -> dict[str, float]:
    """The same, when what had been read ahead is used up, and what the disk gives before and after."""
    seconds = min(DISK_SECONDS, case.seconds)
    rates = [read_rate(_files(case), threads=READ_THREADS, seconds=seconds)]
    batch_bytes = case.batch * case.row_bytes
    _run(None, stream, min(3 * WINDOW_BYTES, case.total_bytes) // batch_bytes, device)
    steps = max(_WARM_STEPS, int(case.seconds / 2 * rates[0] / batch_bytes))
    rate = case.batch * steps / _run(None, stream, steps, device).all_s
    rates.append(read_rate(_files(case), threads=READ_THREADS, seconds=seconds))
    disk = statistics.mean(rates)
    return {"alone_rate": rate, "disk_bytes_per_s": disk, "of_disk": rate * case.row_bytes / disk}


def _files(case: Case) -> list[Path]:
    return [file for file, _, _ in shard_files(case)]


def _loader(case: Case, *, reading: str, shuffle: bool) -> DataLoader:
    source = {"images": _files(case), "labels": labels_file(case)}
    settings: dict[str, Any] = {"reading": reading, "shuffle": shuffle, "device": case.device}
    return DataLoader(source, batch_size=case.batch, drop_last=shuffle, **settings)


def _stream(loader: DataLoader) -> Generator[Batch, None, None]:
    """Epoch after epoch, for ever."""
    while True:
        for batch in loader:
            yield batch["images"], batch["labels"]


@dataclass(frozen=True)
class _Spent:
    """Seconds of some steps, and of those what asking for the batches took."""

    all_s: float
    asking_s: float


def _run(trainer: Trainer | None, stream: Iterator[Batch], steps: int, device: torch.device) -> _Spent:
    """Run ``steps`` steps, all of it done on the device too; without a trainer, the batches alone."""
    clock = time.perf_counter
    _synchronize(device)
    asking_s, start_s = 0.0, clock()
    for _ in range(steps):
        asked_s = clock()
        images, labels = next(stream)
        asking_s += clock() - asked_s
        if trainer is not None:
            trainer.step(images, labels)
    _synchronize(device)
    return _Spent(clock() - start_s, asking_s)


def _vram(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    return {
        "vram_bytes": torch.cuda.max_memory_allocated(device),
        "vram_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
