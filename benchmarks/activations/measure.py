"""Runs one case in this process and measures it."""

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
from benchmarks.training.cases import Case
from benchmarks.training.measure import one_line
from benchmarks.training.methods import Training
from benchmarks.training.results import Result
from benchmarks.training.workload import batch
from torch.cuda.memory import host_memory_stats

from stormtorch.core.sizes import parse_bytes

from . import timeline
from .link import measure_link
from .methods import METHODS, TRAINING
from .model import SIZES, LossWork, build, repeat_heads
from .results import Figures, Row
from .stepping import Moved, Stepping


def measure(case: Case, *, ready: Path, trace: Path | None = None) -> Row:
    """Whatever goes wrong is a result too: the reason in one line, and the memory it had taken by then.

    Creates ``ready`` after the preparation that is in no case's time; the case's time limit begins then.
    """
    known: dict[str, Any] = {}
    figures: dict[str, Any] = {}
    try:
        _measure(case, ready, trace, known, figures)
    except Exception as error:
        traceback.print_exc()
        measured = f" (after steps of {known['step_s']:.3f} s)" if "step_s" in known else ""
        known["failed"] = one_line(error) + measured
    if case.device == "cuda" and torch.cuda.is_initialized():
        known["vram_allocated_bytes"] = torch.cuda.max_memory_allocated()
        known["vram_reserved_bytes"] = torch.cuda.max_memory_reserved()
        figures["pinned_bytes"] = figures.get("pinned_bytes", 0) + _pinned_by_torch()
    # Linux counts in KiB; memory that was mapped and page-locked is in it.
    known["rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return Row(result=Result(case=case, **known), figures=Figures(**figures))


def _measure(case: Case, ready: Path, trace: Path | None, known: dict[str, Any], figures: dict[str, Any]) -> None:
    method, size = METHODS[case.method], SIZES[case.size]
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[case.dtype]
    device = torch.device(case.device, 0) if case.device == "cuda" else torch.device(case.device)
    known.update(parameters=size.parameters, tokens=case.micro_batch * size.sequence)
    if device.type == "cuda":
        _set_up(case, device, figures)
    method.prepare(case)
    ready.touch()

    tokens, targets = batch(size, case.micro_batch, device)
    stored = torch.float32 if method.full_precision else dtype
    where = device if method.on_device else torch.device("cpu")
    model = build(size, targets, dtype=stored, device=where, checkpointing=method.checkpointing)
    if dtype == torch.float32:
        repeat_heads(model)
    work = LossWork(case=case, device=device, dtype=dtype, model=model, tokens=tokens, targets=targets)
    start_s = time.perf_counter()
    training = method.start(work)
    _settle(training, device)
    known["setup_s"] = time.perf_counter() - start_s

    start_s = time.perf_counter()
    training.step()
    _settle(training, device)
    known["first_step_s"] = time.perf_counter() - start_s
    for _ in range(case.warm_steps - 1):
        training.step()
    gc.collect()
    _settle(training, device)

    before, start_s = _moved(training), time.perf_counter()
    known["steps_s"], known["loss"] = _timed(training, case.steps, device)
    known["wall_s"] = (time.perf_counter() - start_s) / case.steps
    known["step_s"] = statistics.median(known["steps_s"])
    after = _moved(training)
    if before is not None and after is not None:
        figures.update(
            counted="report",
            in_bytes=(after.in_bytes - before.in_bytes) // case.steps,
            out_bytes=(after.out_bytes - before.out_bytes) // case.steps,
            pinned_bytes=after.pinned_bytes,
        )
    print(training.report())
    try:
        _profile(case, training, device, trace, figures)
    except Exception:  # what was measured stands without a profile
        traceback.print_exc()
    training.close()


def _set_up(case: Case, device: torch.device, figures: dict[str, Any]) -> None:
    """The device before the case: its arithmetic, its limit, and the link as it is without anything else."""
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if case.method in TRAINING and case.vram:
        limit, total = parse_bytes(case.vram, setting="vram"), torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    link = measure_link(device)
    figures.update(link_in_bytes_per_s=link.in_bytes_per_s, link_out_bytes_per_s=link.out_bytes_per_s)
    torch.cuda.reset_peak_memory_stats(device)


def _timed(training: Training, steps: int, device: torch.device) -> tuple[list[float], float]:
    """Seconds of each step, on a GPU between events on the compute stream; and the last loss. Nothing is pending at
    the end."""
    gpu = device.type == "cuda"
    marks: list[Any] = []

    def mark() -> None:
        if gpu:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())

    mark()
    for _ in range(steps):
        loss = training.step()
        mark()
    _settle(training, device)
    seconds = [one.elapsed_time(two) / 1e3 if gpu else two - one for one, two in pairwise(marks)]
    return seconds, float(loss)


def _profile(case: Case, training: Training, device: torch.device, trace: Path | None, figures: dict[str, Any]) -> None:
    recorded = timeline.record(training, device)
    if recorded is None:
        return
    copied = recorded.copied_bytes
    figures.update(
        busy=recorded.busy, at_once=recorded.at_once, traced_in_bytes=copied["in"], traced_out_bytes=copied["out"]
    )
    if "counted" not in figures:
        figures.update(counted="trace", in_bytes=copied["in"], out_bytes=copied["out"])
    if trace is not None:
        timeline.write(recorded, {"case": case.settings}, trace)
        figures["timeline"] = timeline.drawn(trace)


def _moved(training: Training) -> Moved | None:
    return training.moved() if isinstance(training, Stepping) else None


def _pinned_by_torch() -> int:
    """The peak of torch's own pinned memory, cached blocks included; its names for that differ between versions."""
    return max((int(size) for name, size in host_memory_stats().items() if name.endswith("_bytes.peak")), default=0)


def _settle(training: Training, device: torch.device) -> None:
    training.drain()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
