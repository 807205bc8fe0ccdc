"""Runs one case in this process and times it."""

from __future__ import annotations

import gc
import resource
import statistics
import time
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from .cases import Case
from .methods import Training, Work
from .peers import METHODS
from .results import Result
from .trace import record, summary
from .workload import SIZES, batch, build


def measure(case: Case, *, ready: Path, trace: Path | None = None) -> Result:
    """Whatever goes wrong is a result too: the reason in one line, and the memory it had taken by then.

    Creates ``ready`` after the preparation that is in no case's time; the case's time limit begins then.
    """
    known: dict[str, Any] = {}
    try:
        _measure(case, ready, trace, known)
    except Exception as error:
        traceback.print_exc()
        measured = f" (after steps of {known['step_s']:.3f} s)" if "step_s" in known else ""
        known["failed"] = one_line(error) + measured
    if case.device == "cuda" and torch.cuda.is_initialized():
        known["vram_allocated_bytes"] = torch.cuda.max_memory_allocated()
        known["vram_reserved_bytes"] = torch.cuda.max_memory_reserved()
    # Linux counts in KiB; memory that was mapped and page-locked is in it.
    known["rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return Result(case=case, **known)


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}{'…' if len(text) > 160 else ''}"


def _measure(case: Case, ready: Path, trace: Path | None, known: dict[str, Any]) -> None:
    method, size, clock = METHODS[case.method], SIZES[case.size], time.perf_counter
    device = torch.device(case.device, 0) if case.device == "cuda" else torch.device(case.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # the context exists before a clock runs
    known.update(parameters=size.parameters, tokens=case.micro_batch * size.sequence)

    start_s = clock()
    method.prepare(case)
    known["prepare_s"] = clock() - start_s
    ready.touch()

    start_s = clock()
    where = device if method.on_device else torch.device("cpu")
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[case.dtype]
    stored = torch.float32 if method.full_precision else dtype
    model = build(size, dtype=stored, device=where, checkpointing=method.checkpointing and not case.activations)
    tokens, targets = batch(size, case.micro_batch, device)
    _synchronize(device)
    known["init_s"] = clock() - start_s

    start_s = clock()
    training = method.start(Work(case=case, device=device, dtype=dtype, model=model, tokens=tokens, targets=targets))
    _settle(training, device)
    known["setup_s"] = clock() - start_s

    start_s = clock()
    loss = training.step()
    _settle(training, device)
    known["first_step_s"] = clock() - start_s
    for _ in range(case.warm_steps - 1):
        loss = training.step()
    gc.collect()
    _settle(training, device)

    marks, start_s = [_mark(device)], clock()
    for _ in range(case.steps):
        loss = training.step()
        marks.append(_mark(device))
    _settle(training, device)
    known["wall_s"] = (clock() - start_s) / case.steps
    known["steps_s"] = [_between(*pair) for pair in pairwise(marks)]
    known["step_s"] = statistics.median(known["steps_s"])
    known["loss"] = float(loss)
    if trace is not None:
        record(training, trace, device)
        known["trace"] = summary(trace)
        print(known["trace"])
    print(training.report())
    training.close()


Mark = torch.cuda.Event | float


def _mark(device: torch.device) -> Mark:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Mark, second: Mark) -> float:
    if isinstance(first, float) or isinstance(second, float):
        assert isinstance(first, float)
        assert isinstance(second, float)
        return second - first
    return float(first.elapsed_time(second)) / 1e3


def _settle(training: Training, device: torch.device) -> None:
    training.drain()
    _synchronize(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
