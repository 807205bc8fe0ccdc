"""Which cases of a large grid run where not all of them do: always the same, and with every value of every axis."""

from __future__ import annotations

import os
import zlib
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch

ALL = bool(os.environ.get("STORM_WIDE")) or torch.cuda.is_available()
T = TypeVar("T")


def thinned(cases: Mapping[str, set[Hashable]]) -> set[str]:
    """Of cases by name, with the values that each one has: as many as it takes to have every value. Not every second
    one: that could leave out one half of an axis."""
    kept: set[str] = set()
    seen: set[Hashable] = set()
    for name in sorted(cases, key=lambda name: zlib.crc32(name.encode())):
        if not cases[name] <= seen:
            kept.add(name)
            seen |= cases[name]
    return kept


def daily(some: T, all_of_them: T) -> T:
    """How often a test tries something: ``some`` every day, more in a wide run and on a machine with a GPU."""
    return all_of_them if ALL else some
