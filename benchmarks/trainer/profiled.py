"""What ``torch.profiler`` says of the GPU's time, to hold our own figures against."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from stormtorch.memory.cuda.idle_meter import idle_meter_for
from stormtorch.observe.recorder import Mark
from stormtorch.observe.report import gpu_time

_OFTEN_NS = 500_000  # how often the GPU is looked at beside the profiler: few steps have to tell as much as many


class Profile:
    """Runs from construction to ``end``. Our own meter runs beside it."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.counts: dict[str, int] = {}  # of our meter, as they are: they tell why the two differ
        self._meter: Any = idle_meter_for(torch.device("cuda", torch.cuda.current_device()), period_ns=_OFTEN_NS)
        self._profiler = profile(activities=[ProfilerActivity.CUDA])
        self._profiler.__enter__()
        self._began_s, self._first = _now(), look(session, self._meter)

    def end(self) -> tuple[float, float]:
        """The busy share of the time, by our own report and by the profiler."""
        seconds, last = _now() - self._began_s, look(self._session, self._meter)
        self._profiler.__exit__(None, None, None)
        events = events_of(self._profiler)
        runs = running(events)
        profiled = busy_s(runs) / seconds
        gpu = gpu_time([mark for mark in (self._first, last) if mark is not None])
        if self._meter is not None:
            counts = self._meter._last
            self.counts = {name: getattr(counts, name) for name, _ in counts._fields_}
            self.counts |= {"kernels": sum(event.get("cat") == "kernel" for event in events), "ns": int(seconds * 1e9)}
            if self._first is not None and last is not None:
                self.counts["waited_ns"] = int((last.waited_s - self._first.waited_s) * 1e9)
            self.counts |= gaps(runs)
            self._meter.close()
        return (gpu.busy if gpu is not None else 0.0), profiled


def look(session: Any, meter: Any) -> Mark | None:
    """Our own figures just now, with what ``meter`` has counted."""
    if session is None or meter is None:
        return None
    ground = session._parts.ground
    ground.emit()
    looked_s, idle_s = meter.read()
    waited_s = sum(ground.recorder.snapshot().waits_s.values())
    return Mark(at_s=time.perf_counter(), waited_s=waited_s, looked_s=looked_s, idle_s=idle_s)


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def running(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """The microseconds of a trace in Chrome's format in which at least one kernel ran, or the stream that computes set
    or copied memory; in order, none overlaps another. What lanes copy is not counted."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    streams = [event["args"].get("stream") for event in kernels]
    compute = max(set(streams), key=streams.count, default=None)
    memory = [
        event
        for event in events
        if event.get("cat") in ("gpu_memcpy", "gpu_memset") and event["args"].get("stream") == compute
    ]
    runs: list[tuple[float, float]] = []
    for start, stop in sorted((event["ts"], event["ts"] + event["dur"]) for event in (*kernels, *memory)):
        if runs and start <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(stop, runs[-1][1])
        else:
            runs.append((start, stop))
    return runs


def busy_s(runs: list[tuple[float, float]]) -> float:
    """Seconds of ``running``."""
    return sum(stop - start for start, stop in runs) / 1e6


def gaps(runs: list[tuple[float, float]]) -> dict[str, int]:
    """The number of gaps between ``runs`` and their nanoseconds, by length."""
    bounds_us = 5.0, 20.0, 100.0, math.inf
    found: dict[str, int] = {}
    lengths = [second[0] - first[1] for first, second in itertools.pairwise(runs)]
    for low, high in itertools.pairwise((0.0, *bounds_us)):
        there = [length for length in lengths if low <= length < high]
        found |= {f"gaps below {high:g} us": len(there), f"gaps below {high:g} us, ns": int(sum(there) * 1e3)}
    return found


def events_of(profiler: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events
