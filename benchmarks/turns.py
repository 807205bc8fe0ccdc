"""Runs cases one after the other, and says how each went."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.training.memory import touch_all

C = TypeVar("C", bound=Any)
R = TypeVar("R", bound=Any)


def in_turn(
    cases: Sequence[C], run: Callable[[C, Path, Path], R], *, out: Path | None, write: Callable[[list[R]], object]
) -> list[R]:
    """The results of ``run``, which is given a case, the file for its result, and the log.

    ``write`` is called after every case if there is an ``out``: a run that is cut short leaves what it has."""
    results: list[R] = []
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        log = out.with_suffix(".log") if out else Path(folder) / "log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        if any(case.device == "cuda" for case in cases):
            touch_all()
        for number, case in enumerate(cases):
            print(f"{case.settings} ...", end=" ", file=sys.stderr, flush=True)
            results.append(run(case, Path(folder) / f"{number}.json", log))
            said = results[-1].failed or f"{results[-1].step_s:.3f} s a step"
            print(said, file=sys.stderr, flush=True)
            if out is not None:
                write(results)
    return results
