"""Runs one case in this process."""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.training.methods import ADAMW
from benchmarks.training.workload import SIZES, batch, build, loss_of

from stormtorch.planner.measure.disk import measure_disk
from stormtorch.session.api import Session
from stormtorch.streams.settings import Settings, Trial

_WARM_STEPS = 2


def measure(part: float | None, options: argparse.Namespace) -> dict[str, Any]:
    """``part``: of the units whose states lie on disk, at least; None: there is no disk."""
    device, size = torch.device(options.device), SIZES[options.size]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        rates = [_rate(Path(folder))] if part is not None else []
        model = build(size, dtype=dtype, device=torch.device("cpu"), checkpointing=True)
        batches = [batch(size, options.micro_batch, device) for _ in range(options.accumulate)]
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        vram = options.vram if device.type == "cuda" else "64MiB"
        more = {"disk": folder, "ram": options.ram} if part is not None else {}
        settings = Settings(vram=vram, device=str(device), step=options.step, **more)
        losses, times = list[float](), list[float]()
        with Session(model, optimizer, settings, trial=Trial(disk_part=part or 0.0)) as session:
            for _ in range(_WARM_STEPS + options.steps):
                start_s = time.perf_counter()
                total = torch.zeros((), device=device)
                for tokens, targets in batches:
                    loss = loss_of(model(tokens), targets) / options.accumulate
                    loss.backward()
                    total += loss.detach()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(total))  # the next forward follows the update, so steps overlap as in any loop
                times.append(time.perf_counter() - start_s)
            start_s = time.perf_counter()
            session.synchronize()
            left_s = time.perf_counter() - start_s  # what the last step has left to do, which no later one hides
            report = session.report()
            print(report, session.plan, sep="\n", flush=True)
            anonymous = _anonymous_bytes()
        if part is not None:
            rates.append(_rate(Path(folder)))
    disk = report.disk
    return {
        "parameters": size.parameters,
        "step_s": statistics.mean(times[_WARM_STEPS:]) + left_s / options.steps,
        "times": times,
        "losses": losses,
        "rate": max(rates, default=0.0),
        "read_bytes": 0 if disk is None else disk.read_bytes,
        "written_bytes": 0 if disk is None else disk.written_bytes,
        "hidden": 1.0 if disk is None else disk.hidden,
        "vram_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        "anonymous_bytes": anonymous,
    }


def _rate(folder: Path) -> float:
    rates = measure_disk(folder).rates
    return 0.0 if rates is None else rates.mixed_bytes_per_s


def _anonymous_bytes() -> int:
    """RAM of this process that is no file's."""
    found = re.search(r"^RssAnon:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0
