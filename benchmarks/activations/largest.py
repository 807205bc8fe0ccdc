"""Finds the largest micro-batch that fits: goes on from the first in strides that double, then halves the distance.

Every try is a process of its own. A framework that ran out of memory in the middle of a step is in no state to go on.
"""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from .results import Row

_TOO_LARGE = re.compile(r"OutOfMemoryError|OutOfBudget|out of memory|ALLOC_FAILED|out of RAM", re.IGNORECASE)
_LEAST_S = 20  # less than this is not enough to learn anything


class Fit(enum.Enum):
    FITS = "fits"
    TOO_LARGE = "too large"
    BROKEN = "broken"  # failed for another reason, which a smaller micro-batch need not cure


def fit_of(row: Row) -> Fit:
    if not row.result.failed:
        return Fit.FITS
    return Fit.TOO_LARGE if _TOO_LARGE.search(row.result.failed) else Fit.BROKEN


def next_batch(fits: int, fails: int | None, *, start: int, stride: int, most: int) -> int | None:
    """What to try when ``fits`` is known to fit (0: nothing is) and ``fails`` not to; None when that is close enough:
    nothing in between, or less than an eighth to gain."""
    if not fits and fails is None:
        return min(start, most)
    if fails is None:
        return min(fits + fits - start + stride, most) if fits < most else None
    if not fits:
        return max(fails // 2, fails - (start - fails + stride)) or None
    return (fits + fails) // 2 if fails - fits > max(1, fits // 8) else None


def largest(
    run: Callable[[int, float], Row],
    *,
    start: int,
    most: int,
    limit_s: float,
    guessed: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Row:
    """The row of the largest micro-batch that ``run(micro_batch, seconds left)`` got through, with a note on what came
    after it; or, if there is none, the last failure. ``guessed``: ``start`` should be close to it."""
    end_s = clock() + limit_s
    following = partial(next_batch, start=start, stride=max(1, start // 8) if guessed else start, most=most)
    fits, fails, best = 0, None, None
    batch = following(fits, fails)
    while batch is not None:
        row = run(batch, end_s - clock())
        fit = fit_of(row)
        if fit is Fit.FITS:
            fits, best = batch, row
        elif fit is Fit.TOO_LARGE:
            fails = batch
        if fit is Fit.BROKEN or (best is None and batch == 1):
            return replace(best, note=f"{batch}: {row.result.failed}") if best is not None else row
        batch = following(fits, fails)
        if batch is not None and end_s - clock() < _LEAST_S:
            return replace(best or row, note=f"out of time before {batch} was tried")
    assert best is not None
    return replace(best, note=f"{fails} does not fit" if fails is not None else f"{most} is the most that was tried")
