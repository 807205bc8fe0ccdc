"""Permutations that never change: not between machines, and not with versions of any library.

A library's random generator may change in its next version, and a resumed run would then get other samples. So the
randomness is a hash (the finaliser of splitmix64) of seed, epoch and index, implemented here.

- ``permutation``: sorts hashes. Each key carries its index in its low bits, so that keys are distinct and one sort of
  integers gives the order. Memory is proportional to ``count``.
- ``scatter``: computes single elements of a permutation, without memory: a Feistel network over pairs ``(high, low)``
  of numbers below ``side``, where ``side`` squared is just above ``count``. A result of ``count`` or more goes through
  the network again, until it is below. That keeps it a permutation, and is rare.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
_U64 = np.uint64
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 6


def mix(*values: int) -> int:
    """Hash several numbers to one of 64 bits."""
    state = 0
    for value in values:
        state = (state + value + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def _hashes(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """As ``mix``, for many; wraps around as in C. Does not change ``values``."""
    state = values * _U64(_GOLDEN)
    state += _U64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state ^= state >> _U64(shift)
        state *= _U64(factor)
    state ^= state >> _U64(31)
    return state


def permutation(count: int, key: int) -> Rows:
    """The numbers below ``count``, permuted by ``key``."""
    bits = max(1, (count - 1).bit_length())
    low = _U64((1 << bits) - 1)
    index = np.arange(count, dtype=_U64)
    keys = _hashes(index, key)
    keys &= ~low
    keys |= index
    keys.sort()
    keys &= low
    return keys.view(np.int64)


def scatter(count: int, key: int, positions: Rows) -> Rows:
    """A permutation of the numbers below ``count``, at each of ``positions`` alone."""
    side = _U64(max(1, math.isqrt(count - 1) + 1 if count > 1 else 1))
    keys = [mix(key, number) for number in range(_ROUNDS)]
    found = _scatter_once(positions.astype(_U64), side, keys)
    while len(outside := np.flatnonzero(found >= _U64(count))):
        found[outside] = _scatter_once(found[outside], side, keys)
    return found.view(np.int64)


def _scatter_once(values: NDArray[np.uint64], side: np.uint64, keys: list[int]) -> NDArray[np.uint64]:
    high, low = np.divmod(values, side)
    for key in keys:
        # Scale 32 bits of the hash to a number below side by a product, then add modulo side: no division.
        added = ((_hashes(low, key) >> _U64(32)) * side >> _U64(32)) + high
        high, low = low, np.where(added >= side, added - side, added)
    found: NDArray[np.uint64] = high * side + low
    return found
