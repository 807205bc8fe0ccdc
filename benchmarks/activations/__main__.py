"""``python -m benchmarks.activations GROUP --commit HASH --out FOLDER``: every way to hold activations, each case in a
process of its own with a time limit; one table at the end.

What a case could not do, for want of memory or time, stands in the table as its result.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.about import machine

from .cases import GROUPS, OURS, SEARCHED, Planned, tiny
from .results import Row, text_of, write
from .runner import Runner

_MOST = 256  # sequences in a micro-batch


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.activations", description=__doc__)
    parser.add_argument("group", choices=GROUPS, metavar="GROUP", help=f"one of {', '.join(GROUPS)}")
    parser.add_argument("--commit", required=True, metavar="HASH", help="what to write down as the commit")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="for GROUP.md, .json and .log")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="only these of the group")
    parser.add_argument("--vram", metavar="SIZE", help="budget of the storm cases that would take a peer's peak")
    parser.add_argument("--steps", type=int, metavar="N", help="measured steps, after two warm ones (default: 5)")
    parser.add_argument("--limit", type=float, metavar="S", help="seconds that a case, or a search, may take")
    parser.add_argument(
        "--first", nargs="+", metavar="METHOD=N", help="where the largest micro-batch of a method is looked for first"
    )
    parser.add_argument("--trace", action="store_true", help="also write a small timeline of a step of every case")
    parser.add_argument("--tiny", action="store_true", help="on the CPU: shows that it runs, not how fast")
    options = parser.parse_args()
    known = dict.fromkeys(planned.case.method for planned in GROUPS[options.group])
    wanted = set(options.methods or known)
    if wanted - known.keys():
        unknown = ", ".join(sorted(wanted - known.keys()))
        parser.error(f"{options.group} has no method {unknown}. It has {', '.join(known)}.")
    options.first = _first(options.first or [])
    unknown = ", ".join(sorted(options.first.keys() - known.keys()))
    if options.first and (unknown or options.group not in SEARCHED or min(options.first.values()) < 1):
        parser.error(
            f"--first takes METHOD=N with N at least 1, in groups that look for a micro-batch: {', '.join(SEARCHED)}. "
            f"{options.group} has {', '.join(known)}."
        )
    plan = [planned for planned in GROUPS[options.group] if planned.case.method in wanted]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the case running ends too
    return _all([_set(planned, options) for planned in plan], options)


def _first(given: list[str]) -> dict[str, int]:
    """By method; 0 where it is not a number."""
    pairs = (text.partition("=") for text in given)
    return {method: int(number) if number.isdigit() else 0 for method, _, number in pairs}


def _set(planned: Planned, options: argparse.Namespace) -> Planned:
    """The case with what the command line says about every case."""
    planned = tiny(planned) if options.tiny else planned
    given = {"steps": options.steps, "limit_s": options.limit, "micro_batch": options.first.get(planned.case.method)}
    if planned.at_peak_of and options.vram:
        planned, given = replace(planned, at_peak_of=""), given | {"vram": options.vram}
    return replace(planned, case=replace(planned.case, **{name: v for name, v in given.items() if v is not None}))


def _all(plan: list[Planned], options: argparse.Namespace) -> int:
    rows: list[Row] = []
    command = " ".join(["benchmarks.activations", *sys.argv[1:]])
    about = {"group": options.group, "commit": options.commit, "command": command}
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / f"{options.group}.log"
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(folder=Path(folder), log=log, traces=options.out if options.trace else None)
        for planned in plan:
            if options.group in SEARCHED:
                most = 2 if options.tiny else _MOST
                rows.append(runner.search(planned.case, most=most, guessed=planned.case.method in options.first))
            else:
                rows.append(runner.at_peak(planned, rows))
            write(rows, about, options.out)  # after every case: a run that is cut short leaves what it has
    about = {"machine": machine(), **about}
    write(rows, about, options.out)
    print(text_of(rows, about))
    return int(any(row.result.failed and row.result.case.method in OURS for row in rows))


if __name__ == "__main__":
    sys.exit(main())
