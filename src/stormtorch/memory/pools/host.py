"""Page-locked RAM in pieces of any size."""

from __future__ import annotations

import torch

from ...core.sizes import MiB, round_down, round_up
from ...core.tags import Tag, Tier
from ..books.ledger import Ledger
from ..host.arena import PAGE, HostArena
from ..host.pinned import cannot_lock
from ..host.pinning import PageLock
from ..lanes.build import Lanes
from ..lanes.lane import Event, Lane
from .pool import GRAIN, Block, Piece, Pool

_STEP = 64 * MiB  # small pieces share an allocation


class HostPool(Pool):
    """Page-locked RAM for offloaded tensors. Grows by itself, up to the budget; rounds nothing up.

    Every step asks for the same sizes again, so returned pieces are put aside by size, and the pool stops growing after
    a step or two. When other sizes are requested, these pieces are first merged into the blocks again."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        tag: Tag,
        lanes: Lanes,
        page_lock: PageLock | None,
        pageable: bool = False,
        poison: Lane | None = None,
    ) -> None:
        """``pageable``: memory that could not be page-locked is accepted."""
        super().__init__(ledger=ledger, tag=tag, lanes=lanes, poison=poison)
        self._page_lock, self._pageable = page_lock, pageable or page_lock is None
        self._aside: dict[int, list[tuple[Piece, tuple[Event, ...]]]] = {}  # by size

    def grow(self, size: int) -> None:
        arena = HostArena(round_up(size, GRAIN), ledger=self._ledger, tag=self._tag, page_lock=self._page_lock)
        if not arena.pinned and not self._pageable:
            arena.close()
            raise cannot_lock(arena.capacity_bytes, self._tag, self._ledger, 'use activations="recompute"')
        self._blocks.append(Block(arena.tensor((arena.capacity_bytes,), torch.uint8), arena.close, self._returned))

    def room(self, size: int, lane: Lane) -> Piece:
        """Take ``size`` bytes and let ``lane`` wait for their last uses; raises OutOfBudget if RAM is short."""
        self._take_back(self._put_aside)
        same = self._aside.get(size)
        if same:
            piece, last_uses = same.pop()
            for event in last_uses:
                lane.wait(event)
            return Piece(piece.block, piece.offset, piece.size)  # the old one's finalizers may still return it
        found = self.take(size, lane)
        if found is None:
            self._close_empty()
            free = round_down(self._ledger.free_bytes(Tier.HOST), PAGE)
            # At least ``size``, even if the budget has less: the error then names it.
            self.grow(max(size, min(_STEP, free)))
            found = self.take(size, lane)
        assert found is not None
        return found

    def trim(self) -> None:
        """Return the blocks that have no piece out. Pieces that are aside are merged into the blocks first."""
        self._sort_in()
        self._close_empty()

    def _close_empty(self) -> None:
        """Return unused blocks: they had no room for the request, and sizes may go on changing."""
        for block in list(self._blocks):
            if not block.extents.taken_bytes and all(event.done() for _, _, event in block.uses):
                block.close()
                self._blocks.remove(block)

    def _put_aside(self, piece: Piece, last_uses: tuple[Event, ...]) -> None:
        piece.is_out = False
        self._aside.setdefault(piece.size, []).append((piece, last_uses))

    def _sort_in(self) -> None:
        """Merge all pieces that are aside into the blocks, for requests of any size."""
        super()._sort_in()
        for pieces in self._aside.values():
            for piece, last_uses in pieces:
                self._free(piece, last_uses)
        self._aside.clear()
