"""What ``torch.profiler`` says of the GPU's time, to hold our own figures against."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any


def busy_s(events: list[dict[str, Any]]) -> float:
    """Seconds of a trace in Chrome's format in which at least one kernel ran."""
    kernels = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == "kernel")
    total = end = 0.0
    for start, stop in kernels:
        total += max(0.0, stop - max(end, start))
        end = max(end, stop)
    return total / 1e6


def events_of(profiler: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events
