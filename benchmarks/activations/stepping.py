"""What a method gives back to be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.training.methods import Training


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes that went to and from the device since the beginning, and the page-locked ones that they use."""

    in_bytes: int
    out_bytes: int
    pinned_bytes: int


def _unknown() -> Moved | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Stepping(Training):
    """A step that may count its own traffic; where it does not, the profiler's copies are counted."""

    moved: Callable[[], Moved | None] = _unknown
