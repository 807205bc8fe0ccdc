"""Memory that is taken in large blocks and handed out in pieces of any size; events order the reuse.

The device's pool makes ``vram`` a hard limit: everything that STORM keeps on the device lies in it, however far the
host runs ahead. A piece that is given back carries the events of its last uses; the next user of these bytes waits for
them in its own lane, never on the host. Finalizers may give pieces back, on any thread and in the middle of any call,
so `give` only puts them aside and `take` sorts them in. A piece of the device's pool that is dropped without `give`,
because Ctrl-C came between two lines of its holder, returns by itself.

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
    """Bytes of a pool. The lane that took it may use ``bytes`` until ``DevicePool.give``."""

    __slots__ = ("__weakref__", "block", "bytes", "offset", "size")

    def __init__(self, block: Block, offset: int, size: int) -> None:
        self.block, self.offset, self.size = block, offset, size
        assert block.bytes is not None, "the block was closed"
        self.bytes = block.bytes[offset : offset + size]

    def tensor(self, dtype: torch.dtype, count: int, *, offset: int = 0) -> torch.Tensor:
        """``count`` elements that start ``offset`` bytes into the piece."""
        return self.bytes[offset : offset + count * dtype.itemsize].view(dtype)


class Block:
    """One allocation of the pool: its memory, its free parts, and uses of free bytes that may still run."""

    def __init__(
        self,
        memory: torch.Tensor,
        end: Callable[[], object],
        fresh: Event | None,
        *,
        single: bool = False,
        place: Hashable = None,
    ) -> None:
        """``end`` ends its charge. ``single``: it serves one piece of exactly its size. ``place``: compute's stream at
        allocation."""
        self.bytes: torch.Tensor | None = memory
        self.size, self.address, self.single, self.place = memory.nbytes, memory.data_ptr(), single, place
        self._end = end
        self.extents = Extents(self.size, grain=GRAIN)
        self.uses: list[tuple[int, int, Event]] = [] if fresh is None else [(0, self.size, fresh)]

    def close(self) -> None:
        """Return the memory. All work on it must have ended, or be ordered by other means."""
        self.bytes = None
        self._end()

    def note(self, piece: Piece, last_uses: tuple[Event, ...]) -> None:
        """Let the next user of these bytes wait for ``last_uses``."""
        self.uses = [use for use in self.uses if not use[2].done()]
        self.uses += [(piece.offset, piece.offset + piece.size, event) for event in last_uses]

    def gates(self, start: int, end: int) -> list[Event]:
        """The events for which ``[start, end)`` has to wait."""
        return [event for first, last, event in self.uses if first < end and start < last]

    def gated(self, start: int, end: int) -> None:
        """Drop the events of a range that is taken: its new user waits for them, and later users for it."""
        kept: list[tuple[int, int, Event]] = []
        for first, last, event in self.uses:
            if first >= end or last <= start:
                kept.append((first, last, event))
                continue
            if first < start:
                kept.append((first, start, event))
            if last > end:
                kept.append((end, last, event))
        self.uses = kept


class Pool(ABC):
    """``capacity_bytes`` of one kind of memory. Used by one thread at a time, except for ``give``."""

    def __init__(self, *, ledger: Ledger, tag: Tag, poison: Lane | None = None) -> None:
        """Empty at first; see ``grow``. ``poison`` fills every piece with NaN after its last use, for tests."""
        self._ledger, self._tag, self._poison = ledger, tag, poison
        self._blocks: list[Block] = []
        self._returned: deque[tuple[Piece, tuple[Event, ...]]] = deque()

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
        for block in self._offering(size):
            offset = self._find(block, size)
            if offset is not None:
                piece = self._hand_out(block, offset, size)
                for event in block.gates(offset, offset + size):
                    lane.wait(event)
                block.gated(offset, offset + size)
                return piece
        return None

    def _offering(self, _size: int) -> Iterable[Block]:
        """The blocks that may hold a piece of that size."""
        return self._blocks

    def _find(self, block: Block, size: int) -> int | None:
        return block.extents.take(size, GRAIN)

    def _hand_out(self, block: Block, offset: int, size: int) -> Piece:
        return Piece(block, offset, size)

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
        self._sort_in()
        try:
            for block in self._blocks:
                for _, _, event in block.uses:
                    event.synchronize()
        finally:
            for block in self._blocks:
                block.close()
            self._blocks.clear()

    def _sort_in(self) -> None:
        while self._returned:
            piece, last_uses = self._returned.popleft()
            self._melt(piece, self._poisoned(piece, last_uses))

    def _poisoned(self, piece: Piece, last_uses: tuple[Event, ...]) -> tuple[Event, ...]:
        """Fill the piece with NaN, if ``poison`` is set; returns the events for its next user."""
        if self._poison is None:
            return last_uses
        for event in last_uses:
            self._poison.wait(event)
        self._poison.fill(piece.bytes, 0xFF)
        return (self._poison.record(),)

    def _melt(self, piece: Piece, last_uses: tuple[Event, ...]) -> None:
        piece.block.note(piece, last_uses)
        piece.block.extents.give(piece.offset, piece.size)


class _Out(weakref.ref[Piece]):
    """A weak reference to a piece that is out; remembers its place after the piece is gone."""

    __slots__ = ("block", "offset", "size")

    def __init__(self, piece: Piece, dropped: Callable[[Any], None]) -> None:
        super().__init__(piece, dropped)  # type: ignore[call-arg]  # weakref.ref takes one
        self.block, self.offset, self.size = piece.block, piece.offset, piece.size


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
        super().__init__(ledger=ledger, tag=tag, poison=poison)
        self.device, self._lanes, self._compute, self._sink = device, lanes, lanes.compute, sink
        self._out: dict[tuple[int, int], _Out] = {}
        self._dropped: deque[_Out] = deque()  # dropped without ``give``
        self._unsettled = False  # a call has begun, and not reached its end
        self._gone: deque[weakref.ref[Any]] = deque()  # aliases whose last tensor was dropped
        self._lent: dict[int, tuple[weakref.ref[Any], Piece, list[Event], set[Hashable]]] = {}
        self._melted = 0
        self.span = (0, 0)  # from the lowest address of a block to the end of the highest

    @property
    def returns(self) -> int:
        """Changes when a piece comes back: a `take` that found no room may find some then."""
        return self._melted + len(self._gone) + len(self._dropped) + len(self._returned)

    def grow(self, size: int) -> None:
        self._add(round_down(size, GRAIN), single=False)

    def add_single(self, size: int) -> None:
        """Take a block for one piece of exactly ``size`` bytes, which no other piece can fragment."""
        self._add(round_up(size, GRAIN), single=True)

    def _add(self, size: int, *, single: bool) -> None:
        start_s = time.perf_counter()
        memory, charge = charged_bytes(self.device, size, ledger=self._ledger, tag=self._tag)
        # The allocator may have given memory that queued work of compute still uses: no lane may run ahead of that.
        fresh, place = self._compute.record(), self._compute.place()
        block = Block(memory, charge.release, fresh, single=single, place=place)
        low, high = self.span
        self.span = min(low or block.address, block.address), max(high, block.address + size)
        self._blocks.append(block)
        self._changed(start_s)

    def _changed(self, start_s: float) -> None:
        if self._sink is not None:
            self._sink(Span(What.POOL, start_s, time.perf_counter(), tag=self._tag, bytes=self.capacity_bytes))

    def singles(self) -> list[tuple[int, int]]:
        """Address and size of each block of ``add_single``, the latest first."""
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
        """The piece under a storage of its own; it returns by itself when no tensor over that storage is left.

        It is then free after ``uses``, and after the work queued at ``places`` of compute; both may grow until then.
        """
        tensor, reference = alias(piece.bytes, self._gone)
        self._lent[id(reference)] = (reference, piece, uses, places)
        return tensor

    def take(self, size: int, lane: Lane) -> Piece | None:
        piece = super().take(size, lane)
        self._unsettled = False
        return piece

    def close(self) -> None:
        self._dropped.clear()  # all lanes are empty by now
        start_s = time.perf_counter()
        try:
            super().close()
        finally:
            self._changed(start_s)
        self._out.clear()

    def _offering(self, size: int) -> Iterable[Block]:
        whole = round_up(size, GRAIN)
        yield from (block for block in self._blocks if block.single and block.size == whole)
        yield from (block for block in self._blocks if not block.single)

    def _find(self, block: Block, size: int) -> int | None:
        self._unsettled = True
        return super()._find(block, size)

    def _hand_out(self, block: Block, offset: int, size: int) -> Piece:
        piece = super()._hand_out(block, offset, size)
        if size:  # an empty piece has no place
            self._out[id(block), offset] = _Out(piece, self._dropped.append)
        return piece

    def _sort_in(self) -> None:
        """Sort returned pieces in. Ctrl-C may come at any line; the call can then be repeated."""
        if self._unsettled:
            self._mend()
        self._unsettled = True
        while self._gone:
            reference = self._gone[0]
            if id(reference) in self._lent:
                _, piece, uses, places = self._lent[id(reference)]
                self.give(piece, *(self._compute.record_at(place) for place in places), *uses)
                self._lent.pop(id(reference), None)
            self._gone.popleft()
        while self._dropped:
            out = self._dropped[0]
            if self._out.get((id(out.block), out.offset)) is out:
                piece = Piece(out.block, out.offset, out.size)
                self._melt(piece, self._poisoned(piece, self._lanes.record_all()))
            self._dropped.popleft()
        while self._returned:
            piece, last_uses = self._returned[0]
            if self._is_out(piece):
                self._melt(piece, self._poisoned(piece, last_uses))
            self._returned.popleft()
        self._unsettled = False

    def _mend(self) -> None:
        """Rebuild the extents after an interrupted call, from the pieces that are known to be out."""
        for block in self._blocks:
            block.extents.restore((out.offset, out.size) for out in self._out.values() if out.block is block)

    def _is_out(self, piece: Piece) -> bool:
        """Whether the piece is out. False for one given twice, when an interrupted call was repeated."""
        out = self._out.get((id(piece.block), piece.offset))
        return out is not None and out() is piece

    def _melt(self, piece: Piece, last_uses: tuple[Event, ...]) -> None:
        self._melted += 1
        piece.block.note(piece, last_uses)  # before the piece can be taken again
        del self._out[id(piece.block), piece.offset]
        piece.block.extents.give(piece.offset, piece.size)
