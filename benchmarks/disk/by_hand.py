"""STORM in a training loop by hand."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from benchmarks.training.methods import ADAMW
from benchmarks.training.workload import SIZES, batch, build, loss_of

from stormtorch.session.api import Session
from stormtorch.streams.settings import Settings, Trial

from .cases import Case
from .figures import Figures, anonymous_bytes


def measure(case: Case, options: argparse.Namespace, folder: Path) -> Figures:
    device, size = torch.device(options.device), SIZES[options.size]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build(size, dtype=dtype, device=torch.device("cpu"), checkpointing=True)
    batches = [batch(size, options.micro_batch, device) for _ in range(options.accumulate)]
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    vram = options.vram if device.type == "cuda" else "64MiB"
    more = {"disk": str(folder), "ram": options.ram} if case.part is not None else {}
    settings = Settings(vram=vram, device=str(device), step=options.step, **more)
    losses, times = list[float](), list[float]()
    with Session(model, optimizer, settings, trial=Trial(disk_part=case.part or 0.0)) as session:
        for _ in range(options.warm + options.steps):
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
        disk = report.disk
        return Figures(
            parameters=size.parameters,
            tokens=options.accumulate * options.micro_batch * size.sequence,
            step_s=statistics.mean(times[options.warm :]) + left_s / options.steps,
            times=times,
            losses=losses,
            read_bytes=0 if disk is None else disk.read_bytes,
            written_bytes=0 if disk is None else disk.written_bytes,
            hidden=None if disk is None else disk.hidden,
            anonymous_bytes=anonymous_bytes(),
        )
