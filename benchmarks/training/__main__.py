"""``python -m benchmarks.training [CASE ...]``: one workload, every method, each case in a process of its own with a
time limit; one table at the end.

What a case could not do, for want of memory or time, stands in the table as its result.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.about import ROOT, commit, machine
from benchmarks.turns import in_turn
from benchmarks.watched import ready_file

from .cases import FORM, STEPS, Case, parse
from .isolation import run_isolated
from .packages import NEEDED_BY, put_on_path
from .results import Result, text_of, write


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{FORM} (default: main)")
    parser.add_argument("--out", type=Path, metavar="NAME", help="also write NAME.md, NAME.json and NAME.log")
    parser.add_argument("--size", choices=("tiny", "3b", "7b"), help="model, for every case")
    parser.add_argument("--micro-batch", type=int, metavar="N", help="sequences a step, for every case")
    parser.add_argument("--vram", metavar="SIZE", help="VRAM budget of the storm cases, like 14GiB")
    parser.add_argument("--step", choices=STEPS, help="when the optimizer runs in the storm cases")
    parser.add_argument("--clip", action="store_true", default=None, help="clip the gradient norm in every case")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cpu: shows that it runs, not how fast")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="(default: bfloat16, on the cpu float32)")
    parser.add_argument("--steps", type=int, metavar="N", help="measured steps (default: 5)")
    parser.add_argument("--warm-steps", type=int, metavar="N", help="steps before those (default: 6)")
    parser.add_argument("--limit", type=float, metavar="S", dest="limit_s", help="seconds that one case may take")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="profile of the first storm case: .json or .json.gz")
    parser.add_argument("--commit", help="what to write down as the commit where there is no git (default: git's)")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        _one(Case(**json.loads(options.one[0])), Path(options.one[1]), options.trace)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the case running ends too
    try:
        cases = [_with(case, options) for text in options.cases or ["main"] for case in parse(text)]
    except ValueError as error:
        parser.error(str(error))
    return _all(cases, options)


def _with(case: Case, options: argparse.Namespace) -> Case:
    """The case with what the command line says about every case."""
    given = {field.name: getattr(options, field.name, None) for field in dataclasses.fields(Case)}
    if options.device == "cpu" and options.dtype is None:
        given["dtype"] = "float32"  # a CPU without bf16 instructions takes minutes for what takes a second in fp32
    if case.method != "storm":
        given |= {"vram": None, "step": None}
    return dataclasses.replace(case, **{name: value for name, value in given.items() if value is not None})


def _all(cases: list[Case], options: argparse.Namespace) -> int:
    about = {"commit": options.commit or commit(), "command": " ".join(["benchmarks.training", *sys.argv[1:]])}
    traced = next((case for case in cases if case.method == "storm"), None) if options.trace else None

    def run(case: Case, file: Path, log: Path) -> Result:
        command = [sys.executable, "-u", "-m", "benchmarks.training", "--one", json.dumps(asdict(case)), str(file)]
        if case is traced:
            command += ["--trace", str(options.trace.absolute())]
        return run_isolated(case, command, file, log, cwd=ROOT)

    results = in_turn(cases, run, out=options.out, write=lambda results: write(results, about, options.out))
    about = {"machine": machine(), **about}
    print(text_of(results, about))
    if options.out is not None:
        write(results, about, options.out)
    return int(any(result.failed and result.case.method in {"resident", "storm"} for result in results))


def _one(case: Case, file: Path, trace: Path | None) -> None:
    """Measures in this process and ends it at once: a peer's threads and process groups may not want to."""
    if case.method in NEEDED_BY:
        try:
            put_on_path()
        except FileNotFoundError as error:
            _store(Result(case=case, failed=str(error)), file)
            os._exit(0)
    from .measure import measure

    _store(measure(case, ready=ready_file(file), trace=trace), file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _store(result: Result, file: Path) -> None:
    fields: dict[str, Any] = asdict(result)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(fields))
    part.replace(file)


if __name__ == "__main__":
    sys.exit(main())
