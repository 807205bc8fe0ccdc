"""What a sample costs as the data grow, beside what the disk asks for the same bytes.

The sizes are choices out of one set of shards, which is written before anything is measured: what was just written, or
just read, may lie in a cache below the disk that we see (a hypervisor's, a controller's), and a small set always does.

``storm-direct`` and plain direct reads take turns, a second or so each. Both go through all blocks of the same files in
random orders of their own, so that both find as much of them in such a cache, whatever its size, and whatever others do
to the disk hits both. The files are read once beforehand. Where others use the CPU a slice waits for them, for a while;
figures are medians over the slices in which they had little of it.

``storm-cached`` reads from the page cache.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from stormtorch.core.sizes import parse_bytes
from stormtorch.data.loader import DataLoader
from stormtorch.data.readers.file_windows import READ_THREADS

from .cases import Case
from .cpu import machine_busy_seconds
from .disk import PlainReads
from .made import shard_files
from .once import Tally
from .slices import MEASURED, SKIPPED, Windows
from .timing import peak_rss_bytes

DISK_SECONDS = 2.0
_CACHED_RATE = 4e9  # bytes per second, to choose the number of epochs
_LEAST_SLICES = 3
_IDLE_S = 0.3
_MOST_OTHERS = 0.1  # of all cores: a slice in which others had more is left out, if enough are left


def measure(case: Case) -> dict[str, Any]:
    shards, reading = shard_files(case), case.method.removeprefix("storm-")
    files = [file for file, _, _ in shards]
    figures: dict[str, Any] = {}
    if reading == "cached":
        _warm(case, files)
    else:
        _forget(files)
    with nullcontext() if reading == "cached" else PlainReads(files, threads=READ_THREADS) as plain:
        rate = _CACHED_RATE
        if plain is not None:
            figures["before_bytes_per_s"] = case.total_bytes / plain.read(case.total_bytes)
            rate = plain.rate(min(DISK_SECONDS, case.seconds))
        epochs = _epochs(case, rate)
        settings: dict[str, Any] = {
            "shuffle": True,
            "device": case.device,
            "reading": reading,
            "window": case.window,
            "epochs": epochs,
        }
        with DataLoader(files, batch_size=case.batch, **settings) as loader:
            run, tally = _Run(case, loader), Tally()
            slices = list(run.slices(tally, plain))
            report = loader.report()
    tally.check([range(first, first + count) for _, first, count in shards], times=epochs)
    if not slices:
        raise ValueError(f"{case.rows} rows in windows of {case.window} are too few for a slice")
    quiet = [each for each in slices if each["others"] <= _MOST_OTHERS]
    used = quiet if len(quiet) >= _LEAST_SLICES else slices
    figures |= {name: statistics.median(each[name] for each in used) for name in slices[0]}
    figures["bytes_per_s"] = case.row_bytes / figures["sample_s"]
    if plain is not None:
        figures["disk_bytes_per_s"] = case.row_bytes / figures["disk_s"]
    return figures | {
        "reading": report.reading,
        "rss_bytes": peak_rss_bytes(),
        "ring_bytes": report.ring_bytes,
        "epochs": epochs,
        "slices": f"{len(used)} of {len(slices)}",
        "each": slices,
    }


class _Clock:
    """Time, CPU time of this process, and the share of all cores that others had."""

    def __enter__(self) -> Self:
        self._start = time.perf_counter(), time.process_time(), machine_busy_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        wall_s, cpu_s, busy_s = self._start
        self.wall_s, self.cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        self.others = max(0.0, machine_busy_seconds() - busy_s - self.cpu_s) / self.wall_s / (os.cpu_count() or 1)


class _Run:
    """One loop over the loader."""

    def __init__(self, case: Case, loader: DataLoader) -> None:
        self._case, self._loader = case, loader
        self._windows = Windows(
            rows=case.rows, window_rows=loader._order.window_rows, batch=case.batch, epochs=loader.epochs
        )

    def slices(self, tally: Tally, plain: PlainReads | None) -> Iterator[dict[str, float]]:
        """Goes through all batches; the figures of each slice, when the plain reads after it are done too."""
        batches, given = iter(self._loader), 0
        patience_s = self._case.patience_s
        for first, last in self._windows.slices():
            patience_s -= _wait_for_quiet(patience_s)
            _take(batches, first + 1 - given, tally)
            before = tally.count
            with _Clock() as ours:
                _take(batches, last - first, tally)
            given, rows = last + 1, tally.count - before
            figures = {"sample_s": ours.wall_s / rows, "cpu_s": ours.cpu_s / rows, "others": ours.others}
            if plain is not None:
                _wait_for_idle(min(_IDLE_S, self._case.seconds))
                with _Clock() as theirs:
                    figures["disk_s"] = plain.read(rows * self._case.row_bytes) / rows
                figures["ratio"] = figures["sample_s"] / figures["disk_s"]
                figures["others"] = max(ours.others, theirs.others)
            yield figures
        _take(batches, None, tally)


def _take(batches: Iterator[Tensor], count: int | None, tally: Tally) -> None:
    """So many batches, or all that are left."""
    while count is None or count > 0:
        batch = next(batches, None)
        if batch is None:
            return
        tally.add(batch[:, 0].cpu())
        count = None if count is None else count - 1


def _epochs(case: Case, rate: float) -> int:
    slices_bytes = (_LEAST_SLICES * (SKIPPED + MEASURED + 1) + 1) * parse_bytes(case.window, setting="window")
    return math.ceil(max(case.seconds * rate, slices_bytes) / case.total_bytes)


def _wait_for_quiet(limit_s: float) -> float:
    """Until others have little of the CPU, or the time is over; the seconds that it took."""
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < limit_s:
        with _Clock() as clock:
            time.sleep(_IDLE_S)
        if clock.others <= _MOST_OTHERS:
            break
    return time.perf_counter() - start_s


def _wait_for_idle(seconds: float) -> None:
    """Until what is read ahead has come: until this process has read nothing for so long."""
    before = -1
    while before != (before := _read_bytes()):
        time.sleep(seconds)


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def _forget(files: list[Path]) -> None:
    """Takes the data out of the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _warm(case: Case, files: list[Path]) -> None:
    """Brings the data into the page cache."""
    with DataLoader(files, batch_size=case.batch, reading="cached") as loader:
        for _ in loader:
            pass
