"""How full the device is while each block runs, and so how much earlier blocks may hold then.

One number for the whole pass would be too careful, and not careful enough. Gradients that stay on the device come while
activations go: late blocks may hold what early ones may not. So the level is noted whenever backward reaches a block,
which is when the gradient of its output is there, and the peak with it. Torch's peak is never reset, it belongs to the
user; since it only rises, a block is charged with the least that any pass has shown.

    level    what is allocated when backward reaches the block
    base     the level, less what the blocks up to this one held and what was travelling: everybody else's
    work     what the block takes on top of that until backward has left it, with all that it saves itself"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class _Pass:
    """``held``: by the blocks, in the order of their calls. Index ``len(held)`` stands for the end of forward."""

    held: list[int] = field(default_factory=list)
    levels: dict[int, int] = field(default_factory=dict)
    bases: dict[int, int] = field(default_factory=dict)
    tops: dict[int, int] = field(default_factory=dict)  # the peak when backward had left the block
    last: int | None = None


class Levels:
    """Notes of passes, all with the same blocks. ``allocated`` and ``peak`` ask the device."""

    def __init__(self, allocated: Callable[[], int], peak: Callable[[], int]) -> None:
        self._allocated, self._peak = allocated, peak
        self._now = _Pass()
        self._bases: dict[int, int] = {}  # of the last pass that came by
        self._work: dict[int, int] = {}  # the least of all passes

    def forget(self) -> None:
        """Other blocks, or larger inputs."""
        self._now, self._bases, self._work = _Pass(), {}, {}

    def begin(self) -> None:
        """A pass begins; the one before is over."""
        self._close_last()
        for position, base in self._now.bases.items():
            self._bases[position] = base
            own = self._now.held[position] if position < len(self._now.held) else 0
            work = self._now.tops.get(position, self._peak()) - self._now.levels[position] + own
            self._work[position] = min(work, self._work.get(position, work))
        self._now = _Pass()

    def hold(self, size: int) -> None:
        """The next block has run forward, and holds ``size`` bytes on the device."""
        self._now.held.append(size)

    def reach(self, position: int, travelling_bytes: int) -> None:
        """Backward has come to a block, or to the end of forward; ``travelling_bytes`` are on the device and ours."""
        if position > len(self._now.held) or position in self._now.levels:
            return
        self._close_last()
        level, held = self._allocated(), self._now.held
        self._now.levels[position] = level
        ours = held[: position + 1] if position < len(held) else held[:-1]  # the last block is not asked: it is kept
        self._now.bases[position] = level - sum(ours) - travelling_bytes
        self._now.last = position

    def _close_last(self) -> None:
        if self._now.last is not None:
            self._now.tops[self._now.last] = self._peak()
            self._now.last = None

    def rooms(self, limit_bytes: int, count: int, held: Sequence[int]) -> list[int]:
        """For each of ``count`` blocks, what earlier ones may hold while it runs backward; and last, what all may at
        the end of forward. Where nothing was noted, the peak less all of ``held`` stands in."""
        careful = limit_bytes - self._peak() + sum(held[:-1])
        return [
            limit_bytes - self._bases[position] - self._work[position] if position in self._bases else careful
            for position in range(count + 1)
        ]
