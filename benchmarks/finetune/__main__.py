"""``python -m benchmarks.finetune``: ``storm train`` on a model of given size, from its files to a checkpoint and on.

Random weights are written as sharded safetensors; then the command trains as a user would call it, in a process of its
own, and is killed as soon as there is a checkpoint. The same command again resumes and goes on to the end. The table
has what it took.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.about import ROOT, commit, machine

from .weights import SHAPES, write_model

_DATA = ROOT / "src" / "stormtorch" / "demo_data"
_COLUMNS = (
    "model", "parameters", "files", "vram", "peak VRAM", "peak RSS", "B/param", "weights read", "tokens/s",
    "saved", "checkpoint", "resumed", "losses",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetune", description=__doc__)
    parser.add_argument("sizes", nargs="*", default=["tiny"], choices=SHAPES, metavar="SIZE", help=", ".join(SHAPES))
    parser.add_argument("--scratch", type=Path, help="a folder on the disk to use (default: the system's for such)")
    parser.add_argument("--vram", default="16GiB", help="budget (default: 16GiB)")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step (default: 8)")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a row (default: 2048)")
    parser.add_argument("--dtype", default="bf16", help="bf16 or fp32, which most CPUs are faster with")
    parser.add_argument("--steps", type=int, default=8, help="before the checkpoint, and again after it (default: 8)")
    parser.add_argument("--limit", type=float, default=240, metavar="S", help="seconds that one command may take")
    parser.add_argument("--weights-only", action="store_true", help="save no optimizer states, for a small disk")
    parser.add_argument("--commit", help="what to write down as the commit where there is no git (default: git's)")
    parser.add_argument("--out", type=Path, metavar="NAME", help="also write NAME.md and NAME.log")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows = []
    log = options.out.with_suffix(".log") if options.out else None
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
    for size in options.sizes:
        with tempfile.TemporaryDirectory(dir=options.scratch, prefix="finetune-") as folder:
            rows.append(_measure(size, Path(folder), options, log))
    text = _text(rows, options)
    print(text)
    if options.out is not None:
        options.out.with_suffix(".md").write_text(text)
    return int(any("FAILED" in cell for row in rows for cell in row.values()))


def _measure(size: str, folder: Path, options: argparse.Namespace, log: Path | None) -> dict[str, str]:
    began_s = time.perf_counter()
    model = write_model(folder / "model", size)
    row = {
        "model": size,
        "parameters": f"{model.parameters / 1e9:.2f}e9",
        "files": f"{model.bytes / 1e9:.1f} GB in {time.perf_counter() - began_s:.0f} s",
        "vram": options.vram,
    }
    run = folder / "run"
    failed = _train(model.path, run, options, log, kill=True) or _train(model.path, run, options, log, kill=False)
    metrics = run / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    if failed or losses:
        row["losses"] = f"FAILED: {failed}" if failed else f"{losses[0]:.3f} to {losses[-1]:.3f}"
    newest = max(run.glob("checkpoints/step-*"), default=None)
    if newest is not None:
        size_bytes = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
        row["checkpoint"] = f"{size_bytes / 1e9:.1f} GB"
    return row | _figures(records, model.parameters)


def _train(model: Path, run: Path, options: argparse.Namespace, log: Path | None, *, kill: bool) -> str:
    """Run the command, and ``kill`` it when the first checkpoint is there; what went wrong, if anything did."""
    command = [
        sys.executable, "-m", "stormtorch.cli", "train", "--model", str(model), "--tokenizer", str(_DATA),
        "--data", str(_DATA / "corpus.jsonl"), "--vram", options.vram, "--output", str(run),
        "--steps", str(2 * options.steps), "--batch", str(options.batch), "--sequence", str(options.sequence),
        "--save-every", str(options.steps), "--keep", "1", "--schedule", "constant", "--warmup", "0",
        "--log-every", "1", "--dtype", options.dtype,
    ]  # fmt: skip
    if options.weights_only:
        command.append("--no-save-optimizer")
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            failed = _follow(process, run, options.limit, kill=kill)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        said = output.read()
    if log is not None:
        with log.open("a") as file:
            file.write(f"\n=== {' '.join(command[2:])}\n{said}")
    lines = [line for line in said.splitlines() if line.strip()]
    return f"{failed}: {lines[-1][:160] if lines else ''}" if failed else ""


def _follow(process: subprocess.Popen[bytes], run: Path, limit_s: float, *, kill: bool) -> str:
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if kill and any(run.glob("checkpoints/step-*")):
            return ""
        status = process.poll()
        if status is not None:
            return "ended before there was a checkpoint" if kill else f"status {status}" if status else ""
        time.sleep(0.02)  # the last checkpoint may follow soon
    return f"stopped after {limit_s:g} s"


def _figures(records: list[Mapping[str, Any]], parameters: int) -> dict[str, str]:
    """What the command has written down."""
    found: dict[str, str] = {}
    for record in records:
        match record["kind"]:
            case "load":
                found["weights read"] = f"{record['seconds']:.1f} s"
            case "save":
                found["saved"] = f"{record['seconds']:.1f} s"
            case "resume":
                found["resumed"] = f"{record['seconds']:.1f} s"
            case "end":
                rss = record["peak_rss_bytes"]
                found |= {"peak RSS": f"{rss / 2**30:.1f} GiB", "B/param": f"{rss / parameters:.1f}"}
                if record.get("peak_vram_bytes"):
                    found["peak VRAM"] = f"{record['peak_vram_bytes'] / 2**30:.1f} GiB"
                if record.get("tokens_per_s"):
                    found["tokens/s"] = f"{record['tokens_per_s']:,.0f}"
    return found


def _text(rows: list[dict[str, str]], options: argparse.Namespace) -> str:
    about = {
        "machine": machine(),
        "commit": options.commit or commit(),
        "command": " ".join(["benchmarks.finetune", *sys.argv[1:]]),
        "free disk": f"{shutil.disk_usage(options.scratch or tempfile.gettempdir()).free / 1e9:.0f} GB",
    }
    shown = [column for column in _COLUMNS if any(column in row for row in rows)]
    lines = [f"| {' | '.join(shown)} |", "|---" * len(shown) + "|"]
    lines += [f"| {' | '.join(row.get(column, '') for column in shown)} |" for row in rows]
    return "\n".join(f"{key}: {value}  " for key, value in about.items()) + "\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
