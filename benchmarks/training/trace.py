"""A profile of two steps in Chrome's format, and what the GPU did in it in a few lines."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .methods import Training

_STEPS = 2
_GAPS = 8
_COURSE_US = 50_000.0  # of each line of the course

Span = tuple[float, float]  # microseconds


def record(training: Training, path: Path, device: torch.device) -> None:
    """Runs and drains two more steps. A name that ends in .gz is compressed: it is a tenth of the size."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    path.parent.mkdir(parents=True, exist_ok=True)
    with profile(activities=activities) as profiler:
        for _ in range(_STEPS):
            training.step()
        training.drain()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    profiler.export_chrome_trace(str(path))


def summary(path: Path) -> str:
    """How much of the time, from the GPU's first activity to its last, it computed and copied; where it computed
    nothing longest, and what came after. Kernels that overlap are counted once."""
    raw = path.read_bytes()
    events: list[dict[str, Any]] = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["traceEvents"]
    kernels: list[tuple[float, float, str]] = []
    copies: dict[str, list[Span]] = {"HtoD": [], "DtoH": []}
    moved: dict[str, list[tuple[float, int]]] = {"HtoD": [], "DtoH": []}  # when, and bytes
    for event in events:
        kind, name = event.get("cat"), event.get("name", "")
        if event.get("ph") != "X" or kind not in {"kernel", "gpu_memcpy", "gpu_memset"}:
            continue
        start, end = event["ts"], event["ts"] + event["dur"]
        if kind == "kernel":
            kernels.append((start, end, name))
        for way, spans in copies.items():
            if kind == "gpu_memcpy" and way in name:
                spans.append((start, end))
                moved[way].append(((start + end) / 2, event.get("args", {}).get("bytes", 0)))
    if not kernels:
        return "The trace has no GPU kernels."
    kernels.sort()
    busy = _union([(start, end) for start, end, _ in kernels])
    up, down = _union(copies["HtoD"]), _union(copies["DtoH"])
    everything = [*busy, *up, *down]
    first, last = min(start for start, _ in everything), max(end for _, end in everything)
    wall = last - first
    lines = [f"{_STEPS} steps, {wall / 1e6:.3f} s on the GPU", "", "| busy | share | s |", "|---|---|---|"]
    for label, spans in (("kernels", busy), ("host to device", up), ("device to host", down)):
        lines.append(f"| {label} | {_length(spans) / wall:.1%} | {_length(spans) / 1e6:.3f} |")
    names = {start: name for start, _, name in reversed(kernels)}
    edges = [(first, first), *busy, (last, last)]
    gaps = [(one[1], two[0]) for one, two in pairwise(edges) if two[0] > one[1]]
    gaps.sort(key=lambda gap: gap[0] - gap[1])
    lines += ["", "| no kernel for ms | at ms | copying in | out | then |", "|---|---|---|---|---|"]
    for gap in gaps[:_GAPS]:
        length = gap[1] - gap[0]
        shares = [f"{_length(_within(spans, gap)) / length:.0%}" for spans in (up, down)]
        then = names.get(gap[1], "the end")[:60].replace("|", "/")
        lines.append(f"| {length / 1e3:.2f} | {(gap[0] - first) / 1e3:.1f} | {shares[0]} | {shares[1]} | {then} |")
    lines.append("")
    lines.append(f"All {len(gaps)} gaps: {_length(gaps) / 1e3:.1f} ms.")
    lines += ["", "| from ms | kernels | in GB/s | out GB/s |", "|---|---|---|---|"]
    for number in range(int(wall / _COURSE_US) + 1):
        window = (first + number * _COURSE_US, first + (number + 1) * _COURSE_US)
        rates = [sum(n for at, n in moved[way] if window[0] <= at < window[1]) / _COURSE_US / 1e3 for way in moved]
        share = _length(_within(busy, window)) / _COURSE_US
        lines.append(f"| {number * _COURSE_US / 1e3:.0f} | {share:.0%} | {rates[0]:.0f} | {rates[1]:.0f} |")
    return "\n".join(lines)


def _union(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _within(spans: list[Span], window: Span) -> list[Span]:
    cut = [(max(start, window[0]), min(end, window[1])) for start, end in spans]
    return [(start, end) for start, end in cut if end > start]


def _length(spans: list[Span]) -> float:
    return sum(end - start for start, end in spans)
