"""``python -m benchmarks.disk [CASE ...]``: what a step costs with optimizer states on disk.

A case is a share of the units whose states lie there: ``ram`` (none, without a disk), ``needed`` (as many as ``--ram``
is short of), ``30%``, ``all``. Each has a process of its own, and measures the disk's rate, reading and writing at once
by plain direct I/O, before and after its steps. "least" is what a step needs at least: the time of the ``ram`` case, or
the bytes at the better of both rates. With ``--accumulate N``, a step has N micro-batches.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.about import ROOT, commit, machine
from benchmarks.watched import watch

PARTS = {"ram": None, "needed": 0.0, "30%": 0.3, "all": 1.0}
_COLUMNS = (
    "case", "parameters", "micro-batches", "step s", "least s", "of least", "GB a step", "disk GB/s", "hidden",
    "VRAM GiB", "anonymous RAM GiB", "loss",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.disk", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(PARTS)} (default: ram 30%% all)")
    parser.add_argument("--size", default="3b", choices=("tiny", "3b", "7b", "11b"), help="model (default: 3b)")
    parser.add_argument("--directory", default=tempfile.gettempdir(), metavar="DIR", help="on the disk to measure")
    parser.add_argument("--micro-batch", type=int, default=8, metavar="N", help="sequences (default: 8)")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches in a step (default: 1)")
    parser.add_argument("--step", default="backward", choices=("backward", "forward"), help="when the optimizer runs")
    parser.add_argument("--vram", default="14GiB", metavar="SIZE")
    parser.add_argument("--ram", default="auto", metavar="SIZE", help="of cases with a disk")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="measured, after two (default: 4)")
    parser.add_argument("--limit", type=float, default=250, metavar="S", help="seconds that one case may take")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: shows that it runs")
    parser.add_argument("--commit", help="what to write down as the commit where there is no git (default: git's)")
    parser.add_argument("--out", type=Path, metavar="NAME", help="also write NAME.md and NAME.log")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [case for case in options.cases if case not in PARTS]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(PARTS)}")
    if options.accumulate > 1 and options.step == "backward":
        parser.error("--accumulate needs --step forward")
    if options.one is not None:
        from .one import measure

        file = Path(options.one[1])
        file.with_suffix(".part").write_text(json.dumps(measure(PARTS[options.one[0]], options)))
        file.with_suffix(".part").replace(file)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the case running ends too
    return _all(options.cases or ["ram", "30%", "all"], options)


def _all(cases: list[str], options: argparse.Namespace) -> int:
    rows: list[tuple[str, dict[str, Any]]] = []
    given = [argument for argument in sys.argv[1:] if argument not in PARTS]
    with tempfile.TemporaryDirectory(prefix="disk-") as folder:
        log = options.out.with_suffix(".log") if options.out else Path(folder) / "log"
        log.parent.mkdir(parents=True, exist_ok=True)
        for case in cases:
            file = Path(folder) / f"{len(rows)}.json"
            command = [sys.executable, "-u", "-m", "benchmarks.disk", *given, "--one", case, str(file)]
            watched = watch(command, file, log, title=case, limit_s=options.limit, cwd=ROOT)
            found = {"failed": watched.failed} if watched.failed else json.loads(file.read_text())
            rows.append((case, found))
            print(f"{case}: {found.get('failed') or f'''{found['step_s']:.2f} s'''}", file=sys.stderr, flush=True)
            text = _text(rows, options)
            if options.out:
                options.out.with_suffix(".md").write_text(text)
    print(text)
    return int(any("failed" in row for _, row in rows))


def _text(rows: list[tuple[str, dict[str, Any]]], options: argparse.Namespace) -> str:
    about = {"machine": machine(), "commit": options.commit or commit(), "command": " ".join(sys.argv[1:])}
    lines = [f"{name}: {value}  " for name, value in about.items()]
    lines += ["", f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    in_ram = next((row["step_s"] for case, row in rows if case == "ram" and "failed" not in row), 0.0)
    for case, row in rows:
        if "failed" in row:
            lines.append(f"| {case} | FAILED: {row['failed']} |" + " |" * (len(_COLUMNS) - 2))
            continue
        moved = row["read_bytes"] + row["written_bytes"]
        least_s = max(in_ram, moved / row["rate"] if row["rate"] else 0.0)
        cells = [
            case,
            f"{row['parameters']:,}",
            str(options.accumulate),
            f"{row['step_s']:.3f}",
            f"{least_s:.3f}" if least_s else "",
            f"{row['step_s'] / least_s:.2f}" if least_s else "",
            f"{moved / 1e9:.2f}",
            f"{row['rate'] / 1e9:.2f}" if row["rate"] else "",
            f"{row['hidden']:.0%}" if moved else "",
            f"{row['vram_bytes'] / 2**30:.1f}",
            f"{row['anonymous_bytes'] / 2**30:.1f}",
            f"{row['losses'][0]:.4f} to {row['losses'][-1]:.4f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(["# Optimizer states on disk", "", *lines]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
