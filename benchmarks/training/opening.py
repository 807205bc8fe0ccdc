"""``python -m benchmarks.training.opening``: what a session does while it is being opened, and when, in several
processes one after the other; the first may be the first on its machine.

Not the benchmark's set-up time by another name: every span is timed, which costs a little, and the page faults of the
kernel are told beside it. ``--profile`` adds what the opening thread does, by function; it costs more.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import importlib
import io
import json
import pstats
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.about import ROOT, commit, machine

from .memory import touch_all

# What is timed: module, name in it, how the span is called, which argument is a number of bytes.
_TIMED: tuple[tuple[str, str, str, int | None], ...] = (
    ("stormtorch.memory.host.arena", "first_touch", "touch", 1),
    ("stormtorch.memory.host.pinned", "first_touch", "touch behind", 1),
    ("stormtorch.streams.home.moving", "first_touch", "touch for a weight", 1),
    ("stormtorch.memory.host.pinning", "CudaPageLock.lock", "lock", 2),
    ("stormtorch.session.build", "open_ground", "ground", None),
    ("stormtorch.session.resources", "outline", "outline", None),
    ("stormtorch.session.resources", "partition", "units", None),
    ("stormtorch.streams.home.moving", "Moving.move", "move weights", None),
    ("stormtorch.streams.home.moving", "trim_heap", "trim", None),
    ("stormtorch.session.resources", "open_lanes", "lanes", None),
    ("stormtorch.session.resources", "Flags", "flags", None),
    ("stormtorch.memory.pools.pool", "DevicePool.grow", "pool", 1),
    ("stormtorch.session.resources", "idle_meter_for", "idle meter", None),
    ("stormtorch.session.build", "_open_streams", "streams", None),
    ("stormtorch.streams.model.attach", "Attachment.attach", "attach", None),
    ("stormtorch.session.build", "_arrange", "activations", None),
    ("stormtorch.streams.gradients.stream", "GradientStream.prepare", "gradients' memory", None),
    ("stormtorch.session.build", "_open_adam", "states' memory", None),
    ("stormtorch.session.build", "open_worker", "worker", None),
    ("stormtorch.session.build", "OptimizerStream", "optimizer taken", None),
)
_FUNCTIONS = 30  # of a profile, those that take longest
_KERNEL = ("pgfault", "thp_fault_alloc", "thp_fault_fallback", "compact_stall", "allocstall_normal", "pgmajfault")


@dataclass(frozen=True)
class Span:
    """``start_s`` counts from the call of ``stream``."""

    name: str
    start_s: float
    end_s: float
    thread: str
    bytes: int


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.opening", description=__doc__)
    parser.add_argument("--size", choices=("tiny", "3b", "7b"), default="3b")
    parser.add_argument("--vram", default="14GiB")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--limit", type=float, default=100, help="seconds that one process may take")
    parser.add_argument("--as-it-is", action="store_true", help="do not touch the machine's memory beforehand")
    parser.add_argument("--profile", action="store_true", help="say in which functions the opening thread is")
    parser.add_argument("--commit", help="what to write down as the commit where there is no git (default: git's)")
    parser.add_argument("--out", type=Path, metavar="NAME", help="also write NAME.md and NAME.json")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_opened(options.size, options.vram, options.device, profiled=options.profile)))
        return 0
    touched_s = 0.0
    if not options.as_it_is:
        start_s = time.perf_counter()
        touch_all()
        touched_s = time.perf_counter() - start_s
    found = []
    for number in range(options.processes):
        print(f"process {number + 1} ...", file=sys.stderr, flush=True)
        words = ["--one", "--size", options.size, "--vram", options.vram, "--device", options.device]
        words += ["--profile"] if options.profile else []
        command = [sys.executable, "-m", "benchmarks.training.opening", *words]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=options.limit, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    about = f"{machine()}  \ncommit: {options.commit or commit()}  \nall memory touched before: {touched_s:.1f} s"
    text = f"{about}\n\n{table(found)}\n\n" + "\n\n".join(map(timeline, found))
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".md").write_text(f"# What opening a session does\n\n{text}\n")
        options.out.with_suffix(".json").write_text(json.dumps({"about": about, "processes": found}) + "\n")
    return 0


def _opened(size: str, vram: str, device_name: str, *, profiled: bool) -> dict[str, Any]:
    import torch

    from . import peers  # noqa: F401  # as in a case of the benchmark: its imports are in no case's time
    from .methods import ADAMW
    from .workload import SIZES, build

    device = torch.device(device_name)
    stormtorch: Any = importlib.import_module("stormtorch")
    if device.type == "cuda":
        torch.zeros(1, device=device)
    spans: list[Span] = []
    _ = stormtorch.stream
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build(SIZES[size], dtype=dtype, device=torch.device("cpu"))
    before, start_s = _kernel(), time.perf_counter()
    for module, name, called, size_at in _TIMED:
        _time(module, name, called, size_at, spans, start_s)
    profile = cProfile.Profile()
    with profile if profiled else contextlib.nullcontext():
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        spans.append(Span("optimizer", 0.0, time.perf_counter() - start_s, threading.current_thread().name, 0))
        session = stormtorch.stream(model, optimizer, device=str(device), vram=vram)
        session.synchronize()
        if device.type == "cuda":
            torch.cuda.synchronize()
    opened_s = time.perf_counter() - start_s
    after = _kernel()
    session.close()
    return {
        "opened_s": opened_s,
        "kernel": {name: after[name] - before[name] for name in after},
        "profile": _longest(profile) if profiled else "",
        "spans": [vars(span) for span in sorted(spans, key=lambda span: span.start_s)],
    }


def _longest(profile: cProfile.Profile) -> str:
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(_FUNCTIONS)
    return "\n".join(line for line in text.getvalue().splitlines() if line.strip())


def _time(module: str, name: str, called: str, size_at: int | None, spans: list[Span], origin_s: float) -> None:
    """Put a function that notes its time in the place of the one of that name."""
    owner: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    timed: Callable[..., Any] = getattr(owner, last)

    @functools.wraps(timed, updated=())
    def noting(*args: Any, **kwargs: Any) -> Any:
        start_s = time.perf_counter() - origin_s
        try:
            return timed(*args, **kwargs)
        finally:
            size = int(args[size_at]) if size_at is not None else 0
            end_s = time.perf_counter() - origin_s
            spans.append(Span(called, start_s, end_s, threading.current_thread().name, size))

    setattr(owner, last, noting)


def _kernel() -> dict[str, int]:
    counts = dict(line.split() for line in _lines("/proc/vmstat"))
    found = {name: int(counts.get(name, 0)) for name in _KERNEL}
    anonymous = [line.split() for line in _lines("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")]
    return found | {"huge_kib": int(anonymous[0][1]) if anonymous else 0}


def _lines(path: str) -> Iterable[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def table(processes: list[dict[str, Any]]) -> str:
    """A column a process: what it spent where. Touching and locking overlap, and lie within the memories' spans."""
    heads = [str(number + 1) for number in range(len(processes))]
    lines = [f"| process | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]

    def line(name: str, values: Iterable[str]) -> None:
        lines.append(f"| {name} | {' | '.join(values)} |")

    line("opened, s", (f"{process['opened_s']:.3f}" for process in processes))
    summed = [_sums(process["spans"]) for process in processes]
    for name in summed[0]:
        line(f"{name}, s", (_shown(*sums[name]) for sums in summed))
    for name in processes[0]["kernel"]:
        line(name, (f"{process['kernel'][name]:,}" for process in processes))
    return "\n".join(lines)


def _sums(spans: list[dict[str, Any]]) -> dict[str, tuple[float, int]]:
    sums: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for span in spans:
        seconds, size = sums[span["name"]]
        sums[span["name"]] = seconds + span["end_s"] - span["start_s"], size + span["bytes"]
    return sums


def _shown(seconds: float, size: int) -> str:
    return f"{seconds:.3f}" + (f" ({size / 1e9 / seconds:.1f} GB/s)" if size and seconds else "")


def timeline(process: dict[str, Any]) -> str:
    """A row a span of at least a hundredth of the whole, in the order of their starts; then the profile, if any."""
    whole_s, columns, lines = process["opened_s"], 80, []
    for span in process["spans"]:
        if span["end_s"] - span["start_s"] >= whole_s / 100:
            first, end = (round(columns * span[at] / whole_s) for at in ("start_s", "end_s"))
            bar = " " * first + "#" * max(1, end - first)
            size = f" {span['bytes'] / 2**30:.2f} GiB" if span["bytes"] else ""
            lines.append(f"{span['name'] + size:28}|{bar:{columns}}| {span['end_s'] - span['start_s']:.3f} s")
    return "```\n" + "\n".join([*lines, *process["profile"].splitlines()]) + "\n```"


if __name__ == "__main__":
    sys.exit(main())
