"""What ``torch.profiler`` says of the GPU's time, to hold our own figures against."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from stormtorch.memory.cuda.idle_meter import idle_meter_for
from stormtorch.observe.recorder import Mark
from stormtorch.observe.report import gpu_time

from .nvml import Utilization

_OFTEN_NS = 500_000  # how often the GPU is looked at beside the profiler: few steps have to tell as much as many


class Profile:
    """Runs from construction to ``end``. Our own meter runs beside it."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.counts: dict[str, int] = {}  # of our meter, as they are: they tell why the two differ
        self.nvml = ""
        self._meter: Any = idle_meter_for(torch.device("cuda", torch.cuda.current_device()), period_ns=_OFTEN_NS)
        self._profiler = profile(activities=[ProfilerActivity.CUDA])
        self._profiler.__enter__()
        self._began_s, self._first = _now(), look(session, self._meter)
        self._utilization = Utilization()

    def end(self) -> tuple[float, float]:
        """The busy share of the time, by our own report and by the profiler."""
        seconds, last = _now() - self._began_s, look(self._session, self._meter)
        self.nvml = self._utilization.end()
        self._profiler.__exit__(None, None, None)
        profiled = busy_s(events_of(self._profiler)) / seconds
        gpu = gpu_time([mark for mark in (self._first, last) if mark is not None])
        if self._meter is not None:
            counts = self._meter._last
            self.counts = {name: getattr(counts, name) for name, _ in counts._fields_}
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


def busy_s(events: list[dict[str, Any]]) -> float:
    """Seconds of a trace in Chrome's format in which at least one kernel ran, or the stream that computes set or copied
    memory. What lanes copy is not counted."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    streams = [event["args"].get("stream") for event in kernels]
    compute = max(set(streams), key=streams.count, default=None)
    memory = [
        event
        for event in events
        if event.get("cat") in ("gpu_memcpy", "gpu_memset") and event["args"].get("stream") == compute
    ]
    total = end = 0.0
    for start, stop in sorted((event["ts"], event["ts"] + event["dur"]) for event in (*kernels, *memory)):
        total += max(0.0, stop - max(end, start))
        end = max(end, stop)
    return total / 1e6


def events_of(profiler: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events
