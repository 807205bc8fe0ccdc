"""What ``torch.profiler`` says of the GPU's time, to hold our own figures against."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any


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
