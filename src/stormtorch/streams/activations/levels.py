"""How full the device is while each block runs, and so how much blocks may hold then.

One number for the whole pass would be too careful, and not careful enough. Gradients that stay on the device come while
activations go: late blocks may hold what early ones may not. So the level is noted whenever backward reaches a block,
which is when the gradient of its output is there, and the peak with it.

    level    what is allocated when backward reaches the block
    base     the level, less what the blocks up to this one held and what was travelling: everybody else's
    rise     what comes on top of the level until backward has left the block; it depends on the way the block was run.
             What was travelling and is used up by then, with nothing after it, came on top too: it was early. And
             what a block that is recomputed has held of its own results: others make them anew

Torch's peak is never reset, it belongs to the user. So what it shows of a block may be another's, and is an upper bound
only; but blocks of one kind rise alike, and the least that any of them has shown in any pass holds for all. Nearly
alike: torch hands out what memory it has, up to a MiB more than was asked for. Where the peak went up while backward
was in a block, it was that block's, and none is expected to rise by less from then on. When the user resets the peak in
the middle, it tells nothing about the block that ran then, and that one is left out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

UNCOUNTED = sys.maxsize  # the room on a device that does not say what is allocated, as the CPU

Way = Literal["keep", "whole", "other"]
"""How a block gets through backward: with all that it saved, recomputed, or otherwise."""
_WAYS: tuple[Way, ...] = ("keep", "whole", "other")


@dataclass(frozen=True, kw_only=True)
class Rises:
    """Of one kind of block, by the way it is run."""

    keep: int = 0
    whole: int = 0


@dataclass(frozen=True, kw_only=True)
class _Block:
    kind: Hashable
    way: Way
    held: int


@dataclass(kw_only=True)
class _Bounds:
    """What is known of a rise."""

    at_most: int
    at_least: int

    @property
    def rise(self) -> int:
        return max(self.at_most, self.at_least)


@dataclass(kw_only=True)
class _Pass:
    """Index ``len(blocks)`` of the tables stands for the end of forward."""

    blocks: list[_Block] = field(default_factory=list)
    levels: dict[int, int] = field(default_factory=dict)
    bases: dict[int, int] = field(default_factory=dict)
    tops: dict[int, int] = field(default_factory=dict)  # the peak when backward had left the block
    travelling: dict[int, int] = field(default_factory=dict)
    early: dict[int, int] = field(default_factory=dict)  # how much less was travelling when backward had left the block
    ways: dict[int, int] = field(default_factory=dict)  # what may have been travelling until then
    shown: dict[int, int] = field(default_factory=dict)  # by a peak that went up: less what stayed, or may have come
    last: int | None = None
    is_through: bool = False
    grown: int = 0
    peak_before: int = 0


class Levels:
    """Notes of passes. ``allocated`` and ``peak`` ask the device; ``grown`` tells what was taken of it for good so far,
    between passes."""

    def __init__(
        self, allocated: Callable[[], int], peak: Callable[[], int], grown: Callable[[], int] = lambda: 0
    ) -> None:
        self._allocated, self._peak, self._grown = allocated, peak, grown
        self._now = _Pass()
        self._peak_before = 0
        self.bases: dict[int, int] = {}  # the highest: gradients may stay from one pass to the next
        self.seen: dict[tuple[Hashable, Way], _Bounds] = {}  # rises
        self._end: _Bounds | None = None  # of the rise from the end of forward to the first block of backward: the loss
        self._guessed_end: int | None = None  # where that is not known for inputs as large as they are
        self._risen: int | None = None  # the highest of those that such a pass has set itself

    def forget(self, growth: float) -> None:
        """Inputs are larger now, so many times. The pass that runs goes on."""
        if self._end is not None:
            self._guessed_end = self._end.rise
        if self._guessed_end is not None:
            self._guessed_end = round(self._guessed_end * growth)
        self.bases, self.seen, self._end = {}, {}, None

    @property
    def knows_the_end(self) -> bool:
        """Whether ``rise_at_the_end`` has the loss in it, if as a guess."""
        return self._end is not None or self._guessed_end is not None

    def begin_plan(self) -> None:
        """What follows runs by another plan."""
        self._risen = None

    def risen_top(self) -> int | None:
        """The highest peak that a pass under the present plan has set; None where it was somebody else's, or older."""
        return None if self._risen is None else self._risen + self._grown()

    def end(self) -> None:
        """A backward is through, and the user may do as they like with the peak; another one may follow."""
        last = self._now.last
        self._close_last(0)
        if last == len(self._now.blocks):  # no block was reached, whose level would tell the two apart
            self._now.last, self._now.is_through = last, True

    def begin(self) -> None:
        """A pass begins; the one before is over."""
        if not self._now.is_through:
            self._close_last(0)
        self._peak_before = self._peak()
        past, self._now = self._now, _Pass(grown=self._grown(), peak_before=self._peak_before)
        if past.tops:
            top = max(past.tops.values())
            if top != past.peak_before:
                self._risen = max(self._risen or 0, top - past.grown)
        for position, base in past.bases.items():
            self.bases[position] = max(base, self.bases.get(position, base))
        for position, top in past.tops.items():
            rise, shown = top - past.levels[position], past.shown.get(position)
            if position == len(past.blocks):
                self._end = _narrowed(self._end, rise, shown or 0)
            else:
                block = past.blocks[position]
                own = block.held if block.way == "whole" else 0
                at_least = 0 if shown is None else shown + own
                key = block.kind, block.way
                self.seen[key] = _narrowed(self.seen.get(key), rise + past.early[position] + own, at_least)

    def hold(self, kind: Hashable, way: Way, held: int) -> None:
        """The next block has run forward, and holds ``held`` bytes on the device."""
        self._now.blocks.append(_Block(kind=kind, way=way, held=held))

    def reach(self, position: int, travelling_bytes: int, way_bytes: int = 0) -> None:
        """Backward has come to a block, or to the end of forward; ``travelling_bytes`` are on the device and ours, and
        so many may be, until backward comes to the next, as ``way_bytes`` says."""
        if position > len(self._now.blocks) or position in self._now.levels:
            return
        now, left, peak_before = self._now, self._now.last, self._peak_before
        self._close_last(travelling_bytes)
        level, held = self._allocated(), [block.held for block in now.blocks]
        now.levels[position] = level
        now.bases[position] = level - sum(held[: position + 1]) - travelling_bytes
        now.travelling[position], now.ways[position] = travelling_bytes, way_bytes
        now.last = position
        if left is not None and now.tops.get(left, 0) > peak_before:
            stayed = max(0, now.bases[position] - now.bases[left])
            travelled = max(0, now.ways[left] - now.travelling[left])
            now.shown[left] = now.tops[left] - now.levels[left] - stayed - travelled

    def _close_last(self, travelling_bytes: int) -> None:
        last, peak = self._now.last, self._peak()
        was_reset, self._peak_before = peak < self._peak_before, peak
        if last is not None:
            self._now.last = None
            if not was_reset:
                self._now.tops[last] = peak
                self._now.early[last] = max(0, self._now.travelling[last] - travelling_bytes)

    def rooms(self, limit_bytes: int, count: int, held: Sequence[int]) -> list[int]:
        """What is left for activations while backward is in each of ``count`` blocks, and last, at the end of forward.

        Where nothing is known, the peak less all of ``held`` stands in."""
        careful = limit_bytes - self._peak() + sum(held)
        rooms = [limit_bytes - self.bases[position] if position in self.bases else careful for position in range(count)]
        if count not in self.bases or self._end is None:
            return [*rooms, careful]
        return [*rooms, limit_bytes - self.bases[count] - self._end.rise]

    def rises(self, kind: Hashable, *, saved_bytes: int, others: Sequence[Rises] = ()) -> Rises:
        """What was seen of a kind of block. One way follows from the other: recomputed, a block takes what it saves on
        top of what it takes when it is kept. One that has only been offloaded takes when it is kept what it took then,
        at the most. Where nothing was seen, it takes as much as ``others`` do."""
        keep, whole, other = (None if (known := self.seen.get((kind, way))) is None else known.rise for way in _WAYS)
        if keep is None and whole is None:
            keep = other
        if keep is None:
            keep = max((rise.keep for rise in others), default=0) if whole is None else max(0, whole - saved_bytes)
        return Rises(keep=keep, whole=saved_bytes + keep if whole is None else whole)

    def has_seen(self, kind: Hashable) -> bool:
        """Whether ``rises`` of this kind are more than a guess."""
        return any((kind, way) in self.seen for way in _WAYS)

    def rise_at_the_end(self, kind: Hashable) -> int:
        """The most that was seen to come on top of what is there when forward ends, until backward has left the last
        block, if that is of this kind."""
        at_once = (self._guessed_end or 0) if self._end is None else self._end.rise
        return max(at_once, *(known.rise for (other, _), known in self.seen.items() if other == kind), 0)


def _narrowed(known: _Bounds | None, at_most: int, at_least: int) -> _Bounds:
    if known is None:
        return _Bounds(at_most=at_most, at_least=at_least)
    return _Bounds(at_most=min(at_most, known.at_most), at_least=max(at_least, known.at_least))
