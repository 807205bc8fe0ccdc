"""Memory that is taken in large blocks and handed out in pieces of any size; events order the reuse.

The device's pool makes ``vram`` a hard limit: everything that STORM keeps on the device lies in it, however far the
host runs ahead. A piece that is given back carries the events of its last uses; the next user of these bytes waits for
them in its own lane, never on the host. Finalizers may give pieces back, on any thread and in the middle of any call,
so `give` only puts them aside and `take` sorts them in. A piece that is dropped without `give`, because an exception
came between two lines of its holder, returns by itself.

Why not a ring of equal slots: an embedding can be five times as large as a block, and every slot would have to be as
large as the largest unit."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from ...core.events import Sink, Span, What
from ...core.sizes import round_down, round_up
from ...core.tags import Tag
from ..books.extents import Extents
from ..books.ledger import Ledger
from ..lanes.build import Lanes
from ..lanes.lane import Event, Lane
from .alias import alias
from .device import charged_bytes

GRAIN = 512  # the alignment of torch's CUDA allocator: kernels then choose as for its own tensors


class Piece:
    """Bytes of a pool. The lane that took it may use ``bytes`` until ``Pool.give``."""

    __slots__ = ("block", "bytes", "is_out", "offset", "size")

    def __init__(self, block: Block, offset: int, size: int) -> None:
        self.block, self.offset, self.size, self.is_out = block, offset, size, False
        assert block.bytes is not None, "the block was closed"
        self.bytes = block.bytes[offset : offset + size]
        self.is_out = size > 0  # an empty piece has no place

    def tensor(self, dtype: torch.dtype, count: int, *, offset: int = 0) -> torch.Tensor:
        """``count`` elements that start ``offset`` bytes into the piece."""
        return self.bytes[offset : offset + count * dtype.itemsize].view(dtype)

    def __del__(self) -> None:
        if self.is_out and self.block.bytes is not None:
            self.block.returned.append((self, None))


Returned = deque[tuple[Piece, "tuple[Event, ...] | None"]]
"""Pieces with their last uses; None: dropped, so that the work of all lanes may use them."""


class Block:
    """One allocation of a pool: its memory, its free parts, and uses of free bytes that may still run."""

    def __init__(
        self,
        memory: torch.Tensor,
        end: Callable[[], object],
        returned: Returned,
        fresh: Event | None = None,
        *,
        single: bool = False,
        place: Hashable = None,
    ) -> None:
        """``end`` ends its charge. ``single``: it serves one piece of exactly its size. ``place``: compute's stream at
        allocation."""
        self.bytes: torch.Tensor | None = memory
        self.size, self.address, self.single, self.place = memory.nbytes, memory.data_ptr(), single, place
        self.returned, self._end = returned, end
        self.extents = Extents(self.size, grain=GRAIN)
        self.uses: list[tuple[int, int, Event]] = [] if fresh is None else [(0, self.size, fresh)]

    def close(self) -> None:
        """Return the memory. All work on it must have ended, or be ordered by other means."""
        self.bytes = None
        self._end()

    def take(self, size: int, lane: Lane) -> Piece | None:
        """A piece, for whose last uses ``lane`` waits; None if no hole is large enough."""
        start = self.extents.take(size)
        if start is None:
            return None
        piece, end, kept = Piece(self, start, size), start + size, list[tuple[int, int, Event]]()
        for first, last, event in self.uses:
            if first < end and start < last:
                lane.wait(event)
            kept += [(a, b, event) for a, b in ((first, min(last, start)), (max(first, end), last)) if a < b]
        self.uses = kept  # later users of these bytes wait for this one
        return piece

    def free(self, piece: Piece, last_uses: tuple[Event, ...]) -> None:
        """Let other pieces have these bytes, after ``last_uses``."""
        uses = [use for use in self.uses if not use[2].done()]
        self.uses = uses + [(piece.offset, piece.offset + piece.size, event) for event in last_uses]
        piece.is_out = False
        self.extents.give(piece.offset, piece.size)


class Pool(ABC):
    """``capacity_bytes`` of one kind of memory. Used by one thread at a time, except for ``give``."""

    def __init__(self, *, ledger: Ledger, tag: Tag, lanes: Lanes, poison: Lane | None = None) -> None:
        """Empty at first; see ``grow``. ``poison`` fills every piece with NaN after its last use, for tests."""
        self._ledger, self._tag, self._lanes, self._poison = ledger, tag, lanes, poison
        self._blocks: list[Block] = []
        self._returned: Returned = deque()

    @abstractmethod
    def grow(self, size: int) -> None:
        """Take ``size`` more bytes, in whole grains; raises OutOfBudget if the ledger or the system refuses."""

    @property
    def capacity_bytes(self) -> int:
        return sum(block.size for block in self._blocks)

    @property
    def taken_bytes(self) -> int:
        self._sort_in()
        return sum(block.extents.taken_bytes for block in self._blocks)

    def take(self, size: int, lane: Lane) -> Piece | None:
        """Take ``size`` bytes and let ``lane`` wait for their last uses; None while no hole is large enough."""
        self._sort_in()
        taken = (block.take(size, lane) for block in self._offering(size))
        return next((piece for piece in taken if piece is not None), None)

    def _offering(self, _size: int) -> Iterable[Block]:
        """The blocks that may hold a piece of that size."""
        return self._blocks

    def give(self, piece: Piece, *last_uses: Event) -> None:
        """Free the piece after ``last_uses``. Returns at once; safe in a finalizer."""
        self._returned.append((piece, last_uses))

    def check(self) -> None:
        """Assert that free and taken pieces tile the blocks."""
        self._sort_in()
        for block in self._blocks:
            block.extents.check()

    def close(self) -> None:
        """Wait for the last uses, then return the memory. Pieces that are still out keep their bytes, uncharged."""
        try:
            self._sort_in()
            for block in self._blocks:
                for _, _, event in block.uses:
                    event.synchronize()
        finally:
            for block in self._blocks:
                block.close()
            self._blocks.clear()

    def _sort_in(self) -> None:
        """Free the pieces that were given back or dropped."""
        self._take_back(self._free)

    def _take_back(self, free: Callable[[Piece, tuple[Event, ...]], None]) -> None:
        """Call ``free`` with each returned piece and its last uses. Ctrl-C loses none: entries are removed last."""
        while self._returned:
            piece, last_uses = self._returned[0]
            if piece.is_out:
                free(piece, self._poisoned(piece, self._lanes.record_all() if last_uses is None else last_uses))
            self._returned.popleft()

    def _poisoned(self, piece: Piece, last_uses: tuple[Event, ...]) -> tuple[Event, ...]:
        """Fill the piece with NaN, if ``poison`` is set; returns the events for its next user."""
        if self._poison is None:
            return last_uses
        for event in last_uses:
            self._poison.wait(event)
        self._poison.fill(piece.bytes, 0xFF)
        return (self._poison.record(),)

    def _free(self, piece: Piece, last_uses: tuple[Event, ...]) -> None:
        piece.block.free(piece, last_uses)


class DevicePool(Pool):
    """Memory of the device that computes."""

    def __init__(
        self,
        device: torch.device,
        *,
        ledger: Ledger,
        tag: Tag,
        lanes: Lanes,
        sink: Sink | None = None,
        poison: Lane | None = None,
    ) -> None:
        super().__init__(ledger=ledger, tag=tag, lanes=lanes, poison=poison)
        self.device, self._compute, self._sink = device, lanes.compute, sink
        self._gone: deque[weakref.ref[Any]] = deque()  # aliases whose last tensor was dropped
        self._lent: dict[int, tuple[weakref.ref[Any], Piece, list[Event], set[Hashable]]] = {}
        self._freed = 0
        self.span = (0, 0)  # from the lowest address of a block to the end of the highest

    @property
    def returns(self) -> int:
        """Changes when a piece comes back or the pool grows: a `take` that found no room may find some then."""
        return self._freed + len(self._gone) + len(self._returned)

    def grow(self, size: int, *, single: bool = False) -> None:
        """``single``: for one piece of exactly that size, which no other piece can fragment."""
        start_s, size = time.perf_counter(), round_up(size, GRAIN) if single else round_down(size, GRAIN)
        memory, charge = charged_bytes(self.device, size, ledger=self._ledger, tag=self._tag)
        # The allocator may have given memory that queued work of compute still uses: no lane may run ahead of that.
        fresh, place = self._compute.record(), self._compute.place()
        block = Block(memory, charge.release, self._returned, fresh, single=single, place=place)
        low, high = self.span
        self.span = min(low or block.address, block.address), max(high, block.address + size)
        self._blocks.append(block)
        self._freed += 1
        self._changed(start_s)

    def _changed(self, start_s: float) -> None:
        if self._sink is not None:
            self._sink(Span(What.POOL, start_s, time.perf_counter(), tag=self._tag, bytes=self.capacity_bytes))

    def singles(self) -> list[tuple[int, int]]:
        """Address and size of each block for a single piece, the latest first."""
        return [(b.address, b.size) for b in reversed(self._blocks) if b.single]

    def give_back(self, address: int | None = None) -> int:
        """Return blocks to torch, all or the one at ``address``; keeps those with pieces that are out. Returns the
        bytes. Does not block: torch hands the memory to compute, which waits for the last uses by other lanes."""
        self._sort_in()
        start_s, given = time.perf_counter(), 0
        for block in list(self._blocks):
            if block.extents.taken_bytes or address not in (None, block.address):
                continue
            # Else torch hands the memory to another stream than the current one.
            is_ordered = block.place == self._compute.place()
            for _, _, event in block.uses:
                if is_ordered:
                    self._compute.wait(event)
                else:
                    event.synchronize()
            self._blocks.remove(block)
            given += block.size
            block.close()
        if given:
            self._changed(start_s)
        return given

    def lend(self, piece: Piece, uses: list[Event], places: set[Hashable]) -> torch.Tensor:
        """The piece under a storage of its own; it returns by itself when no tensor over that storage is left. It is
        then free after ``uses``, and after the work queued at ``places`` of compute; both may grow until then."""
        tensor, reference = alias(piece.bytes, self._gone)
        self._lent[id(reference)] = (reference, piece, uses, places)
        return tensor

    def bytes_at(self, address: int, size: int) -> torch.Tensor:
        """Bytes of a piece that is out, for lanes: they do not keep what was lent."""
        block = next(b for b in self._blocks if b.address <= address < b.address + b.size)
        assert block.bytes is not None
        return block.bytes[address - block.address : address - block.address + size]

    def close(self) -> None:
        start_s = time.perf_counter()
        try:
            super().close()
        finally:
            self._changed(start_s)

    def _offering(self, size: int) -> Iterable[Block]:
        whole = round_up(size, GRAIN)
        yield from (block for block in self._blocks if block.single and block.size == whole)
        yield from (block for block in self._blocks if not block.single)

    def _sort_in(self) -> None:
        while self._gone:
            reference = self._gone[0]
            if id(reference) in self._lent:
                _, piece, uses, places = self._lent[id(reference)]
                self.give(piece, *(self._compute.record_at(place) for place in places), *uses)
                self._lent.pop(id(reference), None)
            self._gone.popleft()
        super()._sort_in()

    def _free(self, piece: Piece, last_uses: tuple[Event, ...]) -> None:
        self._freed += 1
        super()._free(piece, last_uses)
