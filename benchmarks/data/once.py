"""Proves that every row came equally often, in memory that does not grow with the data.

The row numbers go through a hash, and the hashes are added up modulo 2^64. A row that is missing or too many changes
the sum, and two mistakes would have to cancel to the last of 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .made import Array

_PIECE = 1 << 16


class Tally:
    """Row numbers counted and summed as hashes."""

    def __init__(self) -> None:
        self.count, self.sum = 0, 0

    def add(self, numbers: Tensor | Array) -> None:
        if isinstance(numbers, Tensor):
            numbers = numbers.to(torch.int64).numpy()
        self.count += len(numbers)
        self.sum = (self.sum + int(_hashed(numbers.astype(np.uint64)).sum())) & (1 << 64) - 1

    def check(self, spans: Sequence[range], *, times: int) -> None:
        """Raises unless each row of ``spans`` was added ``times`` times."""
        due = Tally()
        for span in spans:
            for first in range(span.start, span.stop, _PIECE):
                due.add(np.arange(first, min(first + _PIECE, span.stop)))
        if (self.count, self.sum) != (due.count * times, due.sum * times & (1 << 64) - 1):
            raise RuntimeError(
                f"{due.count} rows were due {times} times each; {self.count} came, and not the right ones"
            )


def _hashed(numbers: Array) -> Array:
    """The finalizer of a 64-bit hash: xor with shifts, odd multipliers."""
    numbers = (numbers + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(numbers ^ (numbers >> np.uint64(32)))
