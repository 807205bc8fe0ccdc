"""``python -m benchmarks.activations.one CASE FILE``: one case in this process, which then ends at once.

The result goes to FILE, what is measured here alone to a file beside it. A module of its own, because a peer's packages
must be on the path before anything imports torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.training.cases import Case
from benchmarks.training.packages import put_on_path
from benchmarks.training.results import Result

from .results import Figures, Row

_ON_PATH = ("ds3", "ramtorch", "ramtorch-offload")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.activations.one", description=__doc__)
    parser.add_argument("case", help="as JSON")
    parser.add_argument("file", type=Path)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    case = Case(**json.loads(options.case))
    _store(_row(case, options.file, options.trace), options.file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a peer's threads and process groups may not want to end


def _row(case: Case, file: Path, trace: Path | None) -> Row:
    if case.method in _ON_PATH:
        try:
            put_on_path()
        except FileNotFoundError as error:
            return Row(result=Result(case=case, failed=str(error)))
    from benchmarks.watched import ready_file

    from .measure import measure

    return measure(case, ready=ready_file(file), trace=trace)


def figures_file(file: Path) -> Path:
    return file.with_suffix(".figures")


def figures_in(file: Path) -> Figures:
    """What the process that wrote ``file`` measured; nothing, if it did not get that far."""
    path = figures_file(file)
    return Figures(**json.loads(path.read_text())) if path.exists() else Figures()


def _store(row: Row, file: Path) -> None:
    figures_file(file).write_text(json.dumps(asdict(row.figures)))
    part = file.with_suffix(".part")
    part.write_text(json.dumps(asdict(row.result)))
    part.replace(file)


if __name__ == "__main__":
    main()
