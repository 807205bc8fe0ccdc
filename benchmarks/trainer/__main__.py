"""``python -m benchmarks.trainer``: models of transformers through ``Trainer`` with its defaults, within budgets.

For each model, shape of batches and budget: the default (``activations="auto"``), ``activations="recompute"``, and the
trainer's own gradient checkpointing; also, if asked for, the trainer of transformers with everything in VRAM. Clipping,
the optimizer and all else are the trainer's defaults. Methods take turns (rounds.py), so VRAM and RAM must have room
for all of them at once.

A method's figure is the median of its steps. Where the host is the limit, steps get slower and faster by a fifth within
seconds, with every method. So methods are compared turn by turn: "auto / best" is the median over all rounds of auto's
turn divided by the other method's turn of the same round; the larger one of the two others.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.about import commit, machine
from benchmarks.models.build import known

from .rounds import Method, outcomes

_GRID = ("llama-2b", "qwen-1b", "moe-2b")
_SHAPES, _BUDGETS = ("8x1024", "4x2048"), ("12GiB", "24GiB")
_METHODS = ("auto", "recompute", "checkpoint")
_COLUMNS = (
    "model",
    "tokens",
    "vram",
    "method",
    "step s",
    "turns s",
    "auto / best",
    "VRAM GiB",
    "reserved GiB",
    "GPU",
    "busy",
    "activations",
    "pool, optimizer",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer", description=__doc__)
    parser.add_argument("models", nargs="*", default=list(_GRID), type=known, metavar="MODEL")
    parser.add_argument("--shapes", nargs="+", default=list(_SHAPES), help="rows x tokens")
    parser.add_argument("--vram", nargs="+", default=list(_BUDGETS))
    parser.add_argument("--methods", nargs="+", default=list(_METHODS))
    parser.add_argument("--plain", action="store_true", help="also the trainer of transformers, all in VRAM")
    parser.add_argument("--no-busy", action="store_true", help="do not compare busy times with torch.profiler's")
    parser.add_argument("--warm", type=int, help="steps before the measured ones (default: until plans have settled)")
    parser.add_argument("--steps", type=int, default=4, help="of a turn; the first of them is not counted")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each method that are measured")
    parser.add_argument("--limit", type=float, default=900, help="seconds that one model may take")
    parser.add_argument("--commit", help="what to write down as the commit where there is no git (default: git's)")
    parser.add_argument("--out", type=Path, metavar="NAME", help="also write NAME.md and NAME.log")
    options = parser.parse_args()
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, str]] = []
    methods = [*options.methods, *(["plain", "plain-checkpoint"] if options.plain else [])]
    for model in options.models:
        rows += _rows(model, methods, options)
        _write(rows, options)  # what is there if a later model does not end in time
    print(_text(rows, options))
    return int(any(row["step s"].startswith("FAILED") for row in rows))


def _rows(model: str, methods: list[str], options: argparse.Namespace) -> list[dict[str, str]]:
    print(f"{model} ...", file=sys.stderr, flush=True)
    made: list[dict[str, str]] = []
    until_s = time.monotonic() + options.limit
    with tempfile.TemporaryDirectory() as output:
        log = (options.out or Path(output) / "log").with_suffix(".log")
        words = [
            "--shapes", *options.shapes, "--vram", *options.vram, "--steps", str(options.steps),
            "--rounds", str(options.rounds), "--output", output,
            *([] if options.warm is None else ["--warm", str(options.warm)]),
        ]  # fmt: skip
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(Method(method, [model, method, *words], log)) for method in methods]
            cells = itertools.product(options.shapes, options.vram)
            for (shape, vram), found in zip(cells, outcomes(processes, until_s), strict=False):
                about = {"model": model, "tokens": shape, "vram": vram}
                rows = [about | _cells(outcome, found) for outcome in found]
                for row in rows:
                    _say(row, "method", "step s", "auto / best")
                made += rows
                if all(outcome["failed"] for outcome in found):
                    return made
        if "auto" in methods and not options.no_busy:  # now that RAM has room for one more
            with Method("busy", [model, "busy", *words], log) as process:
                _add_busy([row for row in made if row["method"] == "auto"], outcomes([process], until_s))
    return made


def _add_busy(rows: list[dict[str, str]], outcomes_of_it: Iterator[list[dict[str, Any]]]) -> None:
    """Add to the rows of "auto" what torch.profiler saw, and our own report beside it."""
    for row, (found,) in zip(rows, outcomes_of_it, strict=False):
        if found["failed"]:
            row["busy"] = _failure(found["failed"])
        elif found["profiled_busy"]:
            row["busy"] = f"{found['busy']:.1%}; torch.profiler: {found['profiled_busy']:.1%}"
        _say(row, "busy")


def _say(row: dict[str, str], *columns: str) -> None:
    about = ("model", "tokens", "vram", *columns)
    print(" ".join(row.get(column, "") for column in about), file=sys.stderr, flush=True)


def _failure(why: str) -> str:
    return f"FAILED: {why}".replace("\n", " ").replace("|", "/")


def _cells(outcome: dict[str, Any], all_of_them: list[dict[str, Any]]) -> dict[str, str]:
    if outcome["failed"]:
        return {"method": outcome["method"], "step s": _failure(outcome["failed"])}
    cells = {
        "method": outcome["method"],
        "step s": f"{_step_s(outcome):.3f}",
        "turns s": " ".join(f"{turn_s:.3f}" for turn_s in _turns(outcome)),
        "VRAM GiB": f"{outcome['vram_bytes'] / 2**30:.1f}",
        "reserved GiB": f"{outcome['reserved_bytes'] / 2**30:.1f}",
        "GPU": outcome["gpu"],
        "activations": outcome["reason"],
        "pool, optimizer": outcome["pool"],
    }
    others = [o for o in all_of_them if o["method"] in ("recompute", "checkpoint") and not o["failed"]]
    if outcome["method"] == "auto" and others:
        cells["auto / best"] = f"{max(_ratio(outcome, other) for other in others):.3f}"
    return cells


def _ratio(outcome: dict[str, Any], other: dict[str, Any]) -> float:
    return statistics.median(a / b for a, b in zip(_turns(outcome), _turns(other), strict=True))


def _turns(outcome: dict[str, Any]) -> list[float]:
    return [statistics.median(turn) for turn in outcome["turns_s"]]


def _step_s(outcome: dict[str, Any]) -> float:
    return float(statistics.median(itertools.chain(*outcome["turns_s"])))


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
