"""How full the device is while each block runs, and so how much earlier blocks may hold then.

One number for the whole pass would be too careful, and not careful enough. Gradients that stay on the device come while
activations go: late blocks may hold what early ones may not. So the level is noted whenever backward reaches a block,
which is when the gradient of its output is there, and the peak with it.

    level    what is allocated when backward reaches the block
    base     the level, less what the blocks up to this one held and what was travelling: everybody else's
    work     what a block takes on top of that until backward has left it, with all that it saves itself

Torch's peak is never reset, it belongs to the user. So what it shows of a block may be another's, and is an upper bound
only; but blocks of one kind take the same, and the least that any of them has shown in any pass holds for all."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class _Block:
    kind: Hashable
    held: int
    extra: int | None


@dataclass(kw_only=True)
class _Pass:
    """Index ``len(blocks)`` of the tables stands for the end of forward."""

    blocks: list[_Block] = field(default_factory=list)
    levels: dict[int, int] = field(default_factory=dict)
    bases: dict[int, int] = field(default_factory=dict)
    tops: dict[int, int] = field(default_factory=dict)  # the peak when backward had left the block
    last: int | None = None


class Levels:
    """Notes of passes. ``allocated`` and ``peak`` ask the device."""

    def __init__(self, allocated: Callable[[], int], peak: Callable[[], int]) -> None:
        self._allocated, self._peak = allocated, peak
        self._now = _Pass()
        self.bases: dict[int, int] = {}  # of the last pass that came by
        self.work: dict[Hashable, int] = {}  # by kind of block; None is the end of forward

    def forget(self) -> None:
        """Inputs are larger now."""
        self._now, self.bases, self.work = _Pass(), {}, {}

    def begin(self) -> None:
        """A pass begins; the one before is over."""
        self._close_last()
        past, self._now = self._now, _Pass()
        self.bases.update(past.bases)
        for position, top in past.tops.items():
            rise = top - past.levels[position]
            if position == len(past.blocks):
                self._learn(None, rise)
            elif past.blocks[position].extra is not None:
                block = past.blocks[position]
                self._learn(block.kind, rise + block.held + (block.extra or 0))

    def _learn(self, kind: Hashable, work: int) -> None:
        self.work[kind] = min(work, self.work.get(kind, work))

    def hold(self, kind: Hashable, held: int, extra: int | None) -> None:
        """The next block has run forward, and holds ``held`` bytes on the device. To be there as a whole in backward it
        would take ``extra`` bytes more than in the way it was run; None: that is not known."""
        self._now.blocks.append(_Block(kind=kind, held=held, extra=extra))

    def reach(self, position: int, travelling_bytes: int) -> None:
        """Backward has come to a block, or to the end of forward; ``travelling_bytes`` are on the device and ours."""
        if position > len(self._now.blocks) or position in self._now.levels:
            return
        self._close_last()
        level, held = self._allocated(), [block.held for block in self._now.blocks]
        self._now.levels[position] = level
        ours = held[: position + 1] if position < len(held) else held[:-1]  # the last block is not asked: it is kept
        self._now.bases[position] = level - sum(ours) - travelling_bytes
        self._now.last = position

    def _close_last(self) -> None:
        if self._now.last is not None:
            self._now.tops[self._now.last] = self._peak()
            self._now.last = None

    def rooms(self, limit_bytes: int, kinds: Sequence[Hashable], held: Sequence[int]) -> list[int]:
        """For each block, what earlier ones may hold while it runs backward; and last, what all may at the end of
        forward. Where nothing is known, the peak less all of ``held`` stands in."""
        careful = limit_bytes - self._peak() + sum(held[:-1])
        return [
            limit_bytes - self.bases[position] - self.work[kind]
            if position in self.bases and kind in self.work
            else careful
            for position, kind in enumerate((*kinds, None))
        ]
