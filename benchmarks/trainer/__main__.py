"""``python -m benchmarks.trainer``: models of transformers through ``Trainer`` with its defaults, within budgets.

One process for each model. In it, for each shape of batches and each budget, the methods follow each other: the default
(``activations="auto"``), ``activations="recompute"``, and the trainer's own gradient checkpointing; also, if asked for,
the trainer of transformers with everything in VRAM. Clipping, the optimizer and all else are the trainer's defaults.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.about import ROOT, commit, machine

from .models import CONFIGS

_GRID = ("llama-2b", "qwen-1b", "moe-2b")
_SHAPES, _BUDGETS = ("8x1024", "4x2048"), ("12GiB", "24GiB")
_METHODS = ("auto", "recompute", "checkpoint")
_COLUMNS = (
    "model",
    "tokens",
    "vram",
    "method",
    "step s",
    "auto / best",
    "VRAM GiB",
    "reserved GiB",
    "GPU",
    "activations",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer", description=__doc__)
    parser.add_argument("models", nargs="*", default=list(_GRID), choices=CONFIGS, metavar="MODEL")
    parser.add_argument("--shapes", nargs="+", default=list(_SHAPES), help="rows x tokens")
    parser.add_argument("--vram", nargs="+", default=list(_BUDGETS))
    parser.add_argument("--methods", nargs="+", default=list(_METHODS))
    parser.add_argument("--plain", action="store_true", help="also the trainer of transformers, all in VRAM")
    parser.add_argument("--warm", type=int, help="steps before the measured ones (default: until plans have settled)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1, help="how often each method runs; the fastest counts")
    parser.add_argument("--limit", type=float, default=600, help="seconds that one process may take")
    parser.add_argument("--commit", help="what to write down as the commit where there is no git (default: git's)")
    parser.add_argument("--out", type=Path, metavar="NAME", help="also write NAME.md and NAME.log")
    options = parser.parse_args()
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".log").write_text("")
    rows: list[dict[str, str]] = []
    methods = [*options.methods, *(["plain", "plain-checkpoint"] if options.plain else [])]
    for model in options.models:
        rows += _rows(model, methods, options)
        _write(rows, options)  # what is there if a later model does not end in time
    print(_text(rows, options))
    return int(any(row["step s"].startswith("FAILED") for row in rows))


def _rows(model: str, methods: list[str], options: argparse.Namespace) -> list[dict[str, str]]:
    print(f"{model} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as output:
        command = [
            sys.executable, "-m", "benchmarks.trainer.one", model, *methods, "--shapes", *options.shapes,
            "--vram", *options.vram, "--steps", str(options.steps), "--rounds", str(options.rounds), "--output", output,
        ]  # fmt: skip
        if options.warm is not None:
            command += ["--warm", str(options.warm)]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=options.limit, check=False)
            said, log = done.stdout, done.stderr
            failed = "" if done.returncode == 0 else f"status {done.returncode}: {done.stderr[-300:]}"
        except subprocess.TimeoutExpired as late:
            said, log = (
                part.decode() if isinstance(part, bytes) else part or "" for part in (late.stdout, late.stderr)
            )
            failed = f"not over after {options.limit:g} s"
    if options.out is not None:
        with options.out.with_suffix(".log").open("a") as file:
            file.write(f"=== {' '.join(command[3:])}\n{log}\n")
    made = []
    for cell in (json.loads(line) for line in said.splitlines() if line.startswith('{"shape"')):
        about = {"model": model, "tokens": cell["shape"], "vram": cell["vram"]}
        made += [about | _cells(outcome, cell["outcomes"]) for outcome in cell["outcomes"]]
    if failed:
        made.append({"model": model, "method": "the rest", "step s": _failure(failed)})
    for row in made:
        words = (row.get(key, "") for key in ("model", "tokens", "vram", "method", "step s", "auto / best"))
        print(" ".join(words), file=sys.stderr, flush=True)
    return made


def _failure(why: str) -> str:
    return f"FAILED: {why}".replace("\n", " ").replace("|", "/")


def _cells(outcome: dict[str, Any], all_of_them: list[dict[str, Any]]) -> dict[str, str]:
    if outcome["failed"]:
        return {"method": outcome["method"], "step s": _failure(outcome["failed"])}
    cells = {
        "method": outcome["method"],
        "step s": f"{outcome['step_s']:.3f}",
        "VRAM GiB": f"{outcome['vram_bytes'] / 2**30:.1f}",
        "reserved GiB": f"{outcome['reserved_bytes'] / 2**30:.1f}",
        "GPU": outcome["gpu"],
        "activations": outcome["reason"],
    }
    if outcome["profiled_busy"]:
        cells["GPU"] += f" (busy {outcome['busy']:.1%} while torch.profiler saw {outcome['profiled_busy']:.1%})"
    others = [o["step_s"] for o in all_of_them if o["method"] in ("recompute", "checkpoint") and not o["failed"]]
    if outcome["method"] == "auto" and others:
        cells["auto / best"] = f"{outcome['step_s'] / min(others):.2f}"
    return cells


def _write(rows: list[dict[str, str]], options: argparse.Namespace) -> None:
    if options.out is not None:
        options.out.with_suffix(".md").write_text(_table(rows))


def _table(rows: list[dict[str, str]]) -> str:
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    return (
        "\n".join([*lines, *(f"| {' | '.join(row.get(column, '') for column in _COLUMNS)} |" for row in rows)]) + "\n"
    )


def _text(rows: list[dict[str, str]], options: argparse.Namespace) -> str:
    about = (
        f"{machine()}  \ncommit: {options.commit or commit()}  \ncommand: benchmarks.trainer {' '.join(sys.argv[1:])}"
    )
    text = f"# Through Trainer\n\n{about}\n\n{_table(rows)}"
    if options.out is not None:
        options.out.with_suffix(".md").write_text(text)
    return text


if __name__ == "__main__":
    sys.exit(main())
