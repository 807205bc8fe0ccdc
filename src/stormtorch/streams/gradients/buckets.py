"""Buckets on the device, where a unit's gradients are gathered before they go home in one copy.

Buckets have their own bytes of the pool: any other piece may be waiting for a load that waits for the CPU."""

from __future__ import annotations

from collections import deque

import torch

from ...core.tags import Tag
from ...memory.lanes.build import Lanes
from ...memory.lanes.lane import Event, Lane
from ...memory.lanes.waits import WaitMeter
from ...memory.pools.pool import Piece
from ..weights.residency import Residency

_COUNT = 2  # one being filled while the other is on its way home


class Buckets:
    """The device's buckets, of which one is lent at a time."""

    def __init__(self, residency: Residency, lanes: Lanes, waits: WaitMeter, *, poison: Lane | None) -> None:
        self._residency, self._lanes, self._waits, self._poison = residency, lanes, waits, poison
        self._free: deque[tuple[Piece, Event | None]] = deque()
        self._large: Piece | None = None  # lent; returns to the pool afterwards
        self.is_lent = False

    def open(self, size: int) -> None:
        """Take the memory for gradients of up to ``size`` bytes, if it has not been taken yet."""
        while len(self._free) < _COUNT:
            self._free.append((self._residency.room(size, self._lanes.compute, Tag.GRADIENTS), None))

    @property
    def size(self) -> int:
        """The bytes of one bucket."""
        return self._free[0][0].size

    def lend(self, size: int, *, for_load: bool = False) -> torch.Tensor:
        """Lend bytes for a unit's gradients, from the pool if they exceed a bucket; compute waits for their last use,
        and with ``for_load`` the load lane too."""
        self._large = None
        if size > self._free[0][0].size:
            self._large = self._residency.room(size, self._lanes.compute, Tag.GRADIENTS)
            self.is_lent = True
            if for_load:
                self._lanes.load.wait(self._lanes.compute.record())
            return self._large.bytes
        self.is_lent = True
        piece, last_use = self._free[0]
        if last_use is not None:
            self._waits.wait(last_use, "buckets")
        if for_load:  # a bucket that was not used yet was given to compute, which may still read what it held before
            self._lanes.load.wait(self._lanes.compute.record() if last_use is None else last_use)
        return piece.bytes[:size]

    def take_back(self, last_use: Event) -> None:
        """Take the lent bytes back, free after ``last_use``."""
        self.is_lent = False
        if self._large is not None:
            self._residency.give(self._large, last_use)
            return
        piece, _ = self._free.popleft()
        if self._poison is not None:
            self._poison.wait(last_use)
            self._poison.fill(piece.bytes, 0xFF)
            last_use = self._poison.record()
        self._free.append((piece, last_use))

    def close(self) -> None:
        """Return the memory to the pool, unless it is lent; ``open`` takes it again."""
        while self._free and not self.is_lent:
            piece, last_use = self._free.popleft()
            self._residency.give(piece, *(() if last_use is None else (last_use,)), self._lanes.compute.record())

    def forget(self) -> None:
        """Let go of memory."""
        self._free.clear()
        self._large = None
