"""Records how full the device is while each block runs, and so how much blocks may hold then.

One number for the whole pass would be too careful for some blocks and not careful enough for others. Gradients that
remain on the device arrive while activations are freed: late blocks may hold more than early ones. So the level is
noted whenever backward reaches a block, which is when the gradient of its output is there, and the peak with it.

    level    bytes allocated when backward reaches the block
    base     the level, less what the blocks up to this one held and what was in flight: all other memory. Without
             what was taken permanently between passes (``grown``): the next pass will find more of it
    rise     bytes on top of the level until backward has left the block; depends on the way the block was run.
             Includes bytes that were in flight and used up by then, with nothing after them: they came early. Includes
             the results that a recomputed block itself had kept: other blocks of its kind compute theirs again

Torch's peak is never reset: it belongs to the user. So the peak seen at a block may come from another one and is only
an upper bound; but blocks of one kind rise alike, and the least rise that any of them has shown in any pass holds for
all. Nearly alike: torch hands out up to a MiB more than was asked for. Where the peak went up while backward was in a
block, that block caused it, and no block of the kind is expected to rise by less from then on. When the user resets the
peak in the middle, it tells nothing about the block that ran then, and that block is left out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

UNCOUNTED = sys.maxsize  # the room on a device that does not report allocations, such as the CPU

_WAYS = ("keep", "recompute", "offload")  # how a block gets through backward (plan.py)


@dataclass(frozen=True, kw_only=True)
class Rises:
    """Rises of one kind of block: with all that it saved, and recomputed."""

    keep: int = 0
    whole: int = 0


class _Block(NamedTuple):
    kind: Hashable
    way: str
    held: int


class _Bounds(NamedTuple):
    """Bounds of a rise, from what was seen."""

    at_most: int
    at_least: int

    @property
    def rise(self) -> int:
        return max(self)

    def narrowed(self, other: _Bounds) -> _Bounds:
        return _Bounds(min(self.at_most, other.at_most), max(self.at_least, other.at_least))


@dataclass(kw_only=True)
class _Visit:
    """Notes of backward in one block, or of the end of forward."""

    level: int
    base: int
    travelling: int
    way: int  # bytes that may have been in flight until backward had left the block
    early: int = 0  # bytes in flight that were used up until then
    top: int | None = None  # the peak then; None if it tells nothing
    # The rise that a higher peak proves: less bytes that remained, or may have arrived.
    shown: int | None = None


@dataclass(kw_only=True)
class _Pass:
    """Notes of one pass. Visit ``len(blocks)`` is the end of forward."""

    blocks: list[_Block] = field(default_factory=list)
    visits: dict[int, _Visit] = field(default_factory=dict)
    last: int | None = None
    is_through: bool = False
    grown: int = 0
    peak_before: int = 0


class Levels:
    """Notes of passes. ``allocated`` and ``peak`` ask the device; ``grown`` gives the bytes taken permanently so far,
    between passes."""

    def __init__(
        self, allocated: Callable[[], int], peak: Callable[[], int], grown: Callable[[], int] = lambda: 0
    ) -> None:
        self._allocated, self._peak, self._grown = allocated, peak, grown
        self._now = _Pass()
        self._peak_before = 0
        self.bases: dict[int, int] = {}  # the highest: gradients may remain from one pass to the next
        self.seen: dict[tuple[Hashable, str], _Bounds] = {}  # rises
        self._end: _Bounds | None = None  # of the rise from the end of forward to the first block of backward: the loss
        self._guessed_end: int | None = None  # scaled up, until it is measured with inputs of the present size
        self._risen: int | None = None  # the highest peak that a pass under the present plan has set

    def forget(self, growth: float) -> None:
        """Inputs have grown by the factor ``growth``: drop the rises. The running pass goes on."""
        if (end := self._end_rise()) is not None:
            self._guessed_end = round(end * growth)
        self.bases, self.seen, self._end = {}, {}, None

    @property
    def knows_the_end(self) -> bool:
        """Whether ``rise_at_the_end`` includes the loss, at least as a guess."""
        return self._end_rise() is not None

    def _end_rise(self) -> int | None:
        return self._guessed_end if self._end is None else self._end.rise

    def begin_plan(self) -> None:
        """Another plan is used from here on."""
        self._risen = None

    def risen_top(self) -> int | None:
        """The highest peak that a pass under the present plan has set; None if an older plan or user code set it."""
        return None if self._risen is None else self._risen + self._grown()

    def end(self) -> None:
        """A backward has ended; another may follow. User code may reset the peak after this."""
        last = self._now.last
        self._close_last(0)
        if last == len(self._now.blocks):  # no block was reached, whose level would separate the two
            self._now.last, self._now.is_through = last, True

    def begin(self) -> None:
        """Begin a pass; the one before is over."""
        if not self._now.is_through:
            self._close_last(0)
        self._peak_before = self._peak()
        past, self._now = self._now, _Pass(grown=self._grown(), peak_before=self._peak_before)
        top = max((visit.top for visit in past.visits.values() if visit.top is not None), default=None)
        if top is not None and top != past.peak_before:
            self._risen = max(self._risen or 0, top - past.grown)
        for position, visit in past.visits.items():
            self.bases[position] = max(visit.base, self.bases.get(position, visit.base))
            if visit.top is None:
                continue
            rise, shown = visit.top - visit.level, visit.shown
            if position == len(past.blocks):
                found = _Bounds(rise, shown or 0)
                self._end = found.narrowed(self._end or found)
            else:
                block = past.blocks[position]
                own = block.held if block.way == "recompute" else 0
                found = _Bounds(rise + visit.early + own, 0 if shown is None else shown + own)
                key = block.kind, block.way
                self.seen[key] = found.narrowed(self.seen.get(key, found))

    def hold(self, kind: Hashable, way: str, held: int) -> None:
        """Note that the next block has run forward and holds ``held`` bytes on the device."""
        self._now.blocks.append(_Block(kind, way, held))

    def reach(self, position: int, travelling_bytes: int, way_bytes: int = 0) -> None:
        """Note that backward has reached a block, or the end of forward. ``travelling_bytes`` of ours are in flight on
        the device; up to ``way_bytes`` may be until backward reaches the next block."""
        now, left, peak_before = self._now, self._now.last, self._peak_before
        if position > len(now.blocks) or position in now.visits:
            return
        self._close_last(travelling_bytes)
        level, held = self._allocated(), sum(block.held for block in now.blocks[: position + 1])
        base = level - held - travelling_bytes - now.grown
        now.visits[position] = _Visit(level=level, base=base, travelling=travelling_bytes, way=way_bytes)
        now.last = position
        if left is not None and (before := now.visits[left]).top is not None and before.top > peak_before:
            stayed, travelled = max(0, base - before.base), max(0, before.way - before.travelling)
            before.shown = before.top - before.level - stayed - travelled

    def _close_last(self, travelling_bytes: int) -> None:
        last, peak = self._now.last, self._peak()
        was_reset, self._peak_before = peak < self._peak_before, peak
        if last is not None:
            self._now.last = None
            if not was_reset:
                visit = self._now.visits[last]
                visit.top, visit.early = peak, max(0, visit.travelling - travelling_bytes)

    def rooms(self, limit_bytes: int, count: int, held: Sequence[int], unseen_bytes: int = 0) -> list[int]:
        """Bytes left for activations while backward is in each of ``count`` blocks and, as the last entry, at the end
        of forward.

        Where nothing is known, uses the peak, which the next pass may exceed by ``unseen_bytes``, less all of
        ``held``."""
        careful, left = limit_bytes - self._peak() - unseen_bytes + sum(held), limit_bytes - self._grown()
        rooms = [left - self.bases[position] if position in self.bases else careful for position in range(count)]
        if count not in self.bases or self._end is None:
            return [*rooms, careful]
        return [*rooms, left - self.bases[count] - self._end.rise]

    def rises(self, kind: Hashable, *, saved_bytes: int, others: Sequence[Rises] = ()) -> Rises:
        """Rises of a kind of block. One way follows from the other: recomputed, a block takes what it saves on top of
        what it takes when it is kept. For a block that was only offloaded, its rise then is an upper bound for keeping
        it. A kind that was not seen takes as much as ``others`` do."""
        keep, whole, other = (None if (known := self.seen.get((kind, way))) is None else known.rise for way in _WAYS)
        if keep is None and whole is None:
            keep = other
        if keep is None:
            keep = max((rise.keep for rise in others), default=0) if whole is None else max(0, whole - saved_bytes)
        return Rises(keep=keep, whole=saved_bytes + keep if whole is None else whole)

    def has_seen(self, kind: Hashable) -> bool:
        """Whether ``rises`` of this kind are measured, not guessed."""
        return any((kind, way) in self.seen for way in _WAYS)

    def rise_at_the_end(self, kind: Hashable) -> int:
        """The largest rise from the end of forward until backward has left the last block, of this kind."""
        return max(self._end_rise() or 0, *(known.rise for (other, _), known in self.seen.items() if other == kind), 0)
