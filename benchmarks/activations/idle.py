"""``python -m benchmarks.activations.idle``: what a step of ``auto`` consists of when it is not alone: kernels, waits
for copies, and a host that is late; with the link filled as planned, and with more or less of it.

Steps follow each other without a pause, as in training. Each share of the link runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.about import ROOT, commit, machine
from benchmarks.training.cases import Case

_WARM_STEPS, _STEPS = 12, 6
_LEAST_GAP_US = 100
_COLUMNS = ("link", "step ms", "kernels ms", "waits ms", "host ms", "host ahead ms", "VRAM GiB", "GiB out / in")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.activations.idle", description=__doc__)
    parser.add_argument("--vram", required=True, help="budget, such as the peak of a peer")
    parser.add_argument("--link", type=float, nargs="+", default=[0.95], help="shares of the link's time to be filled")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--limit", type=float, default=100, help="seconds that one process may take")
    parser.add_argument("--commit", help="what to write down as the commit where there is no git (default: git's)")
    parser.add_argument("--out", type=Path, metavar="NAME", help="also write NAME.md")
    parser.add_argument("--one", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(_measured(options.vram, options.one, options.micro_batch)))
        return 0
    found = []
    for share in options.link:
        words = ["--one", str(share), "--vram", options.vram, "--micro-batch", str(options.micro_batch)]
        command = [sys.executable, "-m", "benchmarks.activations.idle", *words]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=options.limit, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{share:.2f} of the link: {found[-1]['step_ms']:.0f} ms a step", file=sys.stderr, flush=True)
    about = f"{machine()}  \ncommit: {options.commit or commit()}  \ncommand: benchmarks.activations.idle "
    text = f"{about}{' '.join(sys.argv[1:])}\n\n{table(found)}"
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".md").write_text(f"# Activations: what a step consists of\n\n{text}\n")
    return 0


def _measured(vram: str, link_share: float, micro_batch: int) -> dict[str, Any]:
    import torch
    from benchmarks.training.workload import batch
    from torch.profiler import ProfilerActivity, profile

    from stormtorch.streams import activation_plan

    from .model import SIZES, LossWork, build
    from .storm import moved, offload

    activation_plan._HIDDEN = link_share
    device, size = torch.device("cuda", 0), SIZES["3b"]
    tokens, targets = batch(size, micro_batch, device)
    model = build(size, targets, dtype=torch.bfloat16, device=device, checkpointing=False)
    case = Case(method="storm-auto", vram=vram, micro_batch=micro_batch)
    work = LossWork(case=case, device=device, dtype=torch.bfloat16, model=model, tokens=tokens, targets=targets)
    storm = offload(model, vram=vram, mode="auto")
    begins: list[tuple[float, torch.cuda.Event]] = []

    def step() -> None:
        begins.append((time.perf_counter(), torch.cuda.Event(enable_timing=True)))
        begins[-1][1].record()
        with storm.around:
            loss = work.loss()
        loss.backward()
        model.zero_grad()

    def steps(count: int) -> None:
        for _ in range(count):
            step()
        torch.cuda.synchronize()

    steps(_WARM_STEPS)
    before = moved(storm.report())
    begins.clear()
    steps(_STEPS + 1)
    after = moved(storm.report())
    origin_s, origin = begins[0]
    steps_ms = [one.elapsed_time(two) for (_, one), (_, two) in pairwise(begins)]
    ahead_ms = [origin.elapsed_time(event) - (at_s - origin_s) * 1e3 for at_s, event in begins[1:]]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        steps(3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        parts = taken_apart(json.loads(path.read_text())["traceEvents"])
    return {
        "link": link_share,
        "step_ms": statistics.median(steps_ms),
        "steps_ms": steps_ms,
        "ahead_ms": statistics.median(ahead_ms),
        "vram_bytes": torch.cuda.max_memory_allocated(),
        "out_bytes": (after.out_bytes - before.out_bytes) // (_STEPS + 1),
        "in_bytes": (after.in_bytes - before.in_bytes) // (_STEPS + 1),
        "reason": str(storm.report()),
        **{name: spent / 3 for name, spent in parts.items()},
    }


def taken_apart(events: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of a trace in Chrome's format: of kernels; and without any, because the next one waited for a copy,
    or because the host launched it late."""
    launched = {
        event["args"]["correlation"]: event["ts"] + event["dur"]
        for event in events
        if event.get("cat") in {"cuda_runtime", "cuda_driver"} and "correlation" in event.get("args", {})
    }
    kernels = sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])
    parts = {"kernels_ms": 0.0, "waits_ms": 0.0, "host_ms": 0.0}
    end = kernels[0]["ts"]
    for kernel in kernels:
        gap = kernel["ts"] - end
        if gap > _LEAST_GAP_US:
            is_late = launched.get(kernel["args"].get("correlation"), 0.0) > end
            parts["host_ms" if is_late else "waits_ms"] += gap / 1e3
        parts["kernels_ms"] += max(0.0, kernel["ts"] + kernel["dur"] - max(end, kernel["ts"])) / 1e3
        end = max(end, kernel["ts"] + kernel["dur"])
    return parts


def table(found: list[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    for row in found:
        times = [row[name] for name in ("step_ms", "kernels_ms", "waits_ms", "host_ms", "ahead_ms")]
        memory = f"{row['vram_bytes'] / 2**30:.2f}"
        moved = f"{row['out_bytes'] / 2**30:.1f} / {row['in_bytes'] / 2**30:.1f}"
        lines.append(f"| {row['link']:.2f} | {' | '.join(f'{value:.1f}' for value in times)} | {memory} | {moved} |")
    plans = [f"{row['link']:.2f} of the link:\n\n```\n{row['reason']}\n```" for row in found]
    return "\n\n".join(["\n".join(lines), *plans])


if __name__ == "__main__":
    sys.exit(main())
