"""``python -m benchmarks.trainer.paired``: what ``activations="auto"`` is worth, in one process and on the same memory.

Two processes that do the same differ by as much as a fifth on machines whose RAM is not equally fast everywhere: what
is in page-locked RAM stays where it is. So one session trains here with the trainer's defaults, and from turn to turn
its activations are handled in another way:

    auto        as STORM has decided in the steps before
    recompute   every block recomputed; left out where that is what STORM has decided
    checkpoint  the model's own gradient checkpointing, switched on and off as a user would

Weights, optimizer, pool and budget remain the same. A way's figure is the mean of the middle half of its steps, without
the first of each turn. The uncertainty of a ratio is the standard error over rounds. Other work on the machine makes
steps longer, never shorter: the ratio of the fastest quarters shows what is left without it. At the end of each cell a
few steps of auto run under torch.profiler, for the busy time beside our own. What else took the host's time in each
turn is noted too (host_time.py): where the host decides, a difference may come from there.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.about import ROOT, commit, machine
from benchmarks.models.build import CONFIGS, known

_GRID = ("llama-2b", "qwen-1b", "moe-2b")
_SHAPES, _BUDGETS = ("8x1024", "4x2048"), ("12GiB", "24GiB")
_WARM, _MOST_WARM, _PROFILED = 24, 80, 4  # steps; warm until plans have settled
_COLUMNS = (
    "model", "tokens", "vram", "auto s", "recompute s", "checkpoint s", "auto / recompute", "auto / checkpoint",
    "fastest quarter", "VRAM GiB", "busy", "collecting; driver allocated/freed/retried", "activations",
    "pool, optimizer",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer.paired", description=__doc__)
    parser.add_argument("models", nargs="*", default=list(_GRID), type=known, metavar="MODEL")
    parser.add_argument("--shapes", nargs="+", default=list(_SHAPES), help="rows x tokens")
    parser.add_argument("--vram", nargs="+", default=list(_BUDGETS))
    parser.add_argument("--warm", type=int, default=_WARM, help="steps before the measured ones, at least")
    parser.add_argument("--steps", type=int, default=5, help="of a turn; the first of them is not counted")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each way; 0: only the busy time")
    parser.add_argument("--limit", type=float, default=600, help="seconds that one model may take")
    parser.add_argument("--commit", help="what to write down as the commit where there is no git (default: git's)")
    parser.add_argument("--out", type=Path, metavar="NAME", help="also write NAME.md, and NAME.json with every step")
    parser.add_argument("--one", choices=CONFIGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        return _measure(options)
    rows: list[dict[str, Any]] = []
    for model in options.models:
        for row in _rows(model, options):
            rows.append(row)
            _write(rows, options, "")  # a run that is cut short leaves what it has
    _write(rows, options, machine())
    print(_text(rows, options, machine()))
    return int(any(row.get("auto s", "").startswith("FAILED") for row in rows))


def _write(rows: list[dict[str, Any]], options: argparse.Namespace, where: str) -> None:
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".md").write_text(_text(rows, options, where))
        options.out.with_suffix(".json").write_text(json.dumps(rows, indent=1))


def _rows(model: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-u", "-m", "benchmarks.trainer.paired", "--one", model]
    for name in ("shapes", "vram", "warm", "steps", "rounds"):
        value = getattr(options, name)
        command += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    found = 0
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        ended = threading.Timer(options.limit, process.kill)
        ended.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"model"'):
                row = json.loads(line)
                said = (row.get(name, "") for name in ("model", "tokens", "vram", *_COLUMNS[3:9], "busy"))
                print(*said, file=sys.stderr, flush=True)
                found += 1
                yield row
        code = process.wait()
        ended.cancel()
        log.seek(0)
        words = log.read().strip().splitlines()[-1:]
    for shape, vram in list(itertools.product(options.shapes, options.vram))[found:]:
        why = f"not over after {options.limit:g} s" if code < 0 else f"ended with status {code}: {words}"
        yield {"model": model, "tokens": shape, "vram": vram, "auto s": f"FAILED: {why}".replace("|", "/")}


def _text(rows: list[dict[str, Any]], options: argparse.Namespace, where: str) -> str:
    """``where``: the machine, once no case runs any more."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    lines += [f"| {' | '.join(str(row.get(column, '')) for column in _COLUMNS)} |" for row in rows]
    about = f"{where}  \ncommit: {options.commit or commit()}  \ncommand: benchmarks.trainer.paired "
    return f"# Through Trainer, in pairs\n\n{about}{' '.join(sys.argv[1:])}\n\n" + "\n".join(lines) + "\n"


def middle_mean(values: list[float]) -> float:
    """The mean of the middle half: less is lost to steps that the machine has disturbed, and less to chance."""
    ordered, quarter = sorted(values), len(values) // 4
    return statistics.fmean(ordered[quarter : len(ordered) - quarter])


def quickest(turns: list[list[float]]) -> float:
    """The mean of the fastest quarter of the steps."""
    ordered = sorted(itertools.chain(*turns))
    return statistics.fmean(ordered[: max(1, len(ordered) // 4)])


def ratio(first: list[list[float]], second: list[list[float]]) -> str:
    """Of the steps of two ways, round by round, with the standard error."""
    value = middle_mean(list(itertools.chain(*first))) / middle_mean(list(itertools.chain(*second)))
    each = [statistics.fmean(a) / statistics.fmean(b) for a, b in zip(first, second, strict=True)]
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else 0.0
    return f"{value:.3f} ± {error:.3f}"


def _host(turns: list[dict[str, float]]) -> str:
    """Means over turns, per step (host_time.py)."""
    of = {name: statistics.fmean(turn[name] for turn in turns) for name in turns[0]}
    asked = "/".join(f"{of.get(name, 0):.1f}" for name in ("allocated", "freed", "retried"))
    return f"{of['collecting s'] * 1e3:.0f} ms; {asked}"


# --- one model in this process


def _measure(options: argparse.Namespace) -> int:
    import torch
    from benchmarks.models.build import build

    model = build(options.one, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as output:
        for shape, vram in itertools.product(options.shapes, options.vram):
            batch, sequence = (int(word) for word in shape.split("x"))
            given = {**vars(options), "model": options.one, "batch": batch, "sequence": sequence, "vram": vram}
            try:
                row = _cell(model, argparse.Namespace(**given, output=output))
            except Exception as error:  # a cell that fails is a row of the table
                row = {"auto s": f"FAILED: {type(error).__name__}: {error}"[:300].replace("\n", " ").replace("|", "/")}
            model.to("cpu")
            gc.collect()
            print(json.dumps({"model": options.one, "tokens": shape, "vram": vram, **row}), flush=True)
    return 0


def _cell(model: Any, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from .one import trainer_of
    from .ways import Ways

    ways = Ways(model, warm=options.warm, most_warm=_MOST_WARM, steps=options.steps, rounds=options.rounds)
    ways.profiled_steps = _PROFILED
    trainer = trainer_of(model, ways, options, steps=ways.most_steps, storm={}, checkpointing=False)
    ways.trainer = trainer
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    seconds = {way: middle_mean(list(itertools.chain(*turns))) for way, turns in ways.turns_s.items()}
    row: dict[str, Any] = {f"{way} s": f"{mean:.3f}" for way, mean in seconds.items()}
    for way in ("recompute", "checkpoint"):
        if way in ways.turns_s:
            row[f"auto / {way}"] = ratio(ways.turns_s["auto"], ways.turns_s[way])
    if ways.turns_s:
        row.setdefault("auto / recompute", "the same plan")
        best = min(quickest(turns) for way, turns in ways.turns_s.items() if way != "auto")
        row["fastest quarter"] = f"{quickest(ways.turns_s['auto']) / best:.3f}"
    row["turns"], row["host"], row["meter"] = ways.turns_s, ways.host, ways.counts
    row["collecting; driver allocated/freed/retried"] = "; ".join(
        f"{way} {_host(turns)}" for way, turns in ways.host.items()
    )
    if torch.cuda.is_available():
        row["VRAM GiB"] = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}"
    if ways.busy is not None:
        row["busy"] = f"{ways.busy[0]:.1%}; torch.profiler: {ways.busy[1]:.1%}"
    return row | {"activations": ways.reason, "pool, optimizer": ways.pool}


if __name__ == "__main__":
    sys.exit(main())
