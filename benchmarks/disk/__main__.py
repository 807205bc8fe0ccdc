"""``python -m benchmarks.disk [CASE ...]``: what a step costs with optimizer states on disk.

STORM in a loop by hand, by how many units' states lie there: ``ram`` (none, without a disk), ``needed`` (as many as
``--ram`` is short of), ``30%``, ``all``. Through the trainer of transformers, with its gradient checkpointing:
``trainer-ram``, ``trainer-all``. DeepSpeed ZeRO-Infinity: ``ds-states`` (states on disk, weights in RAM), ``ds-all``
(both on disk); a peer that fails is a result.

Each case has a process of its own. It measures the disk's rate, reading and writing at once by plain direct I/O, before
and after its steps. "least" is what a step needs at least: the time of the case in RAM, or the bytes at the better of
both rates. With ``--accumulate N``, a step has N micro-batches.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.about import ROOT, commit, machine
from benchmarks.training.packages import put_on_path
from benchmarks.watched import START_LIMIT_S, ready_file, watch

from .cases import CASES, DEFAULT
from .table import text

_COMPILING_S = 400.0  # before a peer is ready


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.disk", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = " ".join(DEFAULT).replace("%", "%%")
    names = ", ".join(CASES).replace("%", "%%")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{names} (default: {default})")
    parser.add_argument("--size", default="3b", choices=("tiny", "3b", "7b", "11b"), help="model (default: 3b)")
    parser.add_argument("--directory", default=tempfile.gettempdir(), metavar="DIR", help="on the disk to measure")
    parser.add_argument("--micro-batch", type=int, default=8, metavar="N", help="sequences (default: 8)")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches in a step (default: 1)")
    parser.add_argument(
        "--step", default="backward", choices=("backward", "forward"), help="when the optimizer of a loop by hand runs"
    )
    parser.add_argument("--vram", default="14GiB", metavar="SIZE", help="STORM's budget")
    parser.add_argument("--ram", default="auto", metavar="SIZE", help="of STORM's cases with a disk")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="measured (default: 4)")
    parser.add_argument("--warm", type=int, default=2, metavar="N", help="steps before those, at least 1 (default: 2)")
    parser.add_argument("--limit", type=float, default=250, metavar="S", help="seconds that one case may take")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: shows that it runs")
    parser.add_argument("--commit", help="what to write down as the commit where there is no git (default: git's)")
    parser.add_argument("--out", type=Path, metavar="NAME", help="also write NAME.md and NAME.log")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = options.cases or list(DEFAULT)
    unknown = [case for case in cases if case not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    if options.one is not None:
        _one(options.one[0], Path(options.one[1]), options)
    if options.warm < 1:
        parser.error("--warm is at least 1: states are made in the first step")
    if options.accumulate > 1 and options.step == "backward" and any(CASES[case].way == "by_hand" for case in cases):
        parser.error("--accumulate needs --step forward")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the case running ends too
    return _all(cases, options)


def _one(name: str, file: Path, options: argparse.Namespace) -> None:
    """Measures in this process and ends it at once: a peer's threads may not want to."""
    try:
        if CASES[name].is_peer:
            put_on_path()
        from .one import measure

        found = measure(CASES[name], options, ready_file(file))
    except FileNotFoundError as error:
        found = {"failed": str(error)}
    part = file.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.replace(file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _all(cases: list[str], options: argparse.Namespace) -> int:
    rows: list[tuple[str, dict[str, Any]]] = []
    given = [argument for argument in sys.argv[1:] if argument not in CASES]
    about = {"commit": options.commit or commit(), "command": " ".join(sys.argv[1:])}
    with tempfile.TemporaryDirectory(prefix="disk-") as folder:
        log = options.out.with_suffix(".log") if options.out else Path(folder) / "log"
        log.parent.mkdir(parents=True, exist_ok=True)
        for case in cases:
            file = Path(folder) / f"{len(rows)}.json"
            command = [sys.executable, "-u", "-m", "benchmarks.disk", *given, "--one", case, str(file)]
            ready_s = _COMPILING_S if CASES[case].is_peer else START_LIMIT_S
            watched = watch(command, file, log, title=case, limit_s=options.limit, cwd=ROOT, start_limit_s=ready_s)
            found = {"failed": watched.failed} if watched.failed else json.loads(file.read_text())
            rows.append((case, found | {"ram_bytes": watched.ram_bytes}))
            print(f"{case}: {found.get('failed') or f'''{found['step_s']:.2f} s'''}", file=sys.stderr, flush=True)
            if options.out:  # a run that is cut short leaves what it has
                options.out.with_suffix(".md").write_text(text(rows, about))
    made = text(rows, {"machine": machine(), **about})
    print(made)
    if options.out:
        options.out.with_suffix(".md").write_text(made)
    return int(any("failed" in row and not CASES[case].is_peer for case, row in rows))


if __name__ == "__main__":
    sys.exit(main())
