"""One step as the profiler saw it: when kernels ran and bytes moved each way, in a file small enough to commit."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.training.methods import Training
from torch.profiler import ProfilerActivity, profile

from .spans import Span, common, length, union

_WIDTH = 100
_LEVELS = " ▁▂▃▄▅▆▇█"
_LANES = ("compute", "in", "out")
_COPIES = {"in": "HtoD", "out": "DtoH"}


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Spans of each lane, from the GPU's first activity on; kernels that overlap are counted once."""

    wall_us: float
    lanes: dict[str, list[Span]]
    copied_bytes: dict[str, int]

    @property
    def busy(self) -> float:
        """The share of the time in which some kernel ran."""
        return length(self.lanes["compute"]) / self.wall_us

    @property
    def at_once(self) -> float:
        """The share of the time in which a kernel ran and bytes moved both ways."""
        compute, inwards, outwards = (self.lanes[name] for name in _LANES)
        return length(common(common(compute, inwards), outwards)) / self.wall_us


def record(training: Training, device: torch.device) -> Timeline | None:
    """Runs and drains one more step. None where no kernel ran, as on a CPU."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[activity]) as profiler:
            training.step()
            training.drain()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return from_events(events)


def from_events(events: list[dict[str, Any]]) -> Timeline | None:
    """From the events of a trace in Chrome's format."""
    spans: dict[str, list[Span]] = {name: [] for name in _LANES}
    copied = dict.fromkeys(_COPIES, 0)
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in {"kernel", "gpu_memcpy"}:
            continue
        span = (event["ts"], event["ts"] + event["dur"])
        if event["cat"] == "kernel":
            spans["compute"].append(span)
        for lane, way in _COPIES.items():
            if event["cat"] == "gpu_memcpy" and way in event["name"]:
                spans[lane].append(span)
                copied[lane] += int(event.get("args", {}).get("bytes", 0))
    if not spans["compute"]:
        return None
    first = min(start for lane in spans.values() for start, _ in lane)
    last = max(end for lane in spans.values() for _, end in lane)
    lanes = {name: union((start - first, end - first) for start, end in lane) for name, lane in spans.items()}
    return Timeline(wall_us=last - first, lanes=lanes, copied_bytes=copied)


def write(timeline: Timeline, about: dict[str, str], path: Path) -> None:
    """Whole microseconds; spans less than a thousandth of the step apart become one."""
    gap = timeline.wall_us / 1000
    lanes = {
        name: [[round(start), round(end)] for start, end in union(lane, gap=gap)]
        for name, lane in timeline.lanes.items()
    }
    fields = {
        **about,
        "wall_us": round(timeline.wall_us),
        "busy": round(timeline.busy, 4),
        "at_once": round(timeline.at_once, 4),
        "copied_bytes": timeline.copied_bytes,
        "lanes_us": lanes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields, separators=(",", ":")) + "\n")


def drawn(path: Path) -> str:
    """What ``write`` wrote, as three lines of text: the fuller a column, the busier that hundredth of the step."""
    fields = json.loads(path.read_text())
    width_us = fields["wall_us"] / _WIDTH
    lines = []
    for name in _LANES:
        lane = [(start, end) for start, end in fields["lanes_us"][name]]
        shares = [
            length(common(lane, [(column * width_us, (column + 1) * width_us)])) / width_us for column in range(_WIDTH)
        ]
        columns = "".join(_LEVELS[min(len(_LEVELS) - 1, round(share * (len(_LEVELS) - 1)))] for share in shares)
        lines.append(f"{name:<8}|{columns}|")
    return "\n".join(lines)
