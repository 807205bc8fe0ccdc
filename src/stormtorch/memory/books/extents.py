"""Allocates ranges inside one contiguous space: the sub-allocator behind the pools.

It deals in numbers only and owns no memory, so that the same code, and the same property tests, serve VRAM and RAM.

Best fit, with neighbours merged on release. The sorted list of holes costs memmoves of a few hundred KiB even with
65,536 holes. The road not taken: a buddy allocator, which needs no search. Rounding to powers of two is the waste that
this code exists to avoid.

A call that an exception interrupts may lose room, and never gives out the same bytes twice.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from ...core.sizes import round_up


class Extents:
    """Free and taken extents of ``[0, capacity_bytes)``. Not thread-safe: the owner holds a lock."""

    def __init__(self, capacity_bytes: int, *, grain: int = 1) -> None:
        """Extents begin and end at multiples of ``grain``, and so does the space."""
        self.capacity_bytes, self.grain = capacity_bytes, grain
        self.taken_bytes = 0  # as asked for
        self._taken: dict[int, int] = {}  # offset -> size asked for
        self._holes: dict[int, int] = {}  # start -> end
        self._starts: dict[int, int] = {}  # end -> start
        self._by_size: list[tuple[int, int]] = []  # (size, start)
        self._add_hole(0, capacity_bytes)

    def take(self, size: int) -> int | None:
        """Offset of ``size`` bytes, or None if no hole fits. Size 0 takes nothing."""
        if size == 0:
            return 0
        index = bisect_left(self._by_size, (size, 0))
        if index == len(self._by_size):
            return None
        start = self._by_size[index][1]
        self._add_hole(start + round_up(size, self.grain), self._remove_hole(start))
        self._taken[start] = size
        self.taken_bytes += size
        return start

    def give(self, offset: int, size: int) -> None:
        """Return an extent of ``take``. Size 0 returns nothing."""
        if size == 0:
            return
        asked = self._taken.pop(offset, None)
        assert asked == size, f"extent {offset}+{size} is not taken"
        self.taken_bytes -= size
        start, end = offset, offset + round_up(size, self.grain)
        if end in self._holes:
            end = self._remove_hole(end)
        if offset in self._starts:
            start = self._starts[offset]
            self._remove_hole(start)
        self._add_hole(start, end)

    def check(self) -> None:
        """Assert conservation: taken and free extents tile the space, no two free ones touch."""
        assert self._by_size == sorted((end - start, start) for start, end in self._holes.items())
        assert self._starts == {end: start for start, end in self._holes.items()}
        assert self.taken_bytes == sum(self._taken.values())
        spans = [(start, end, True) for start, end in self._holes.items()]
        spans += [(start, start + round_up(size, self.grain), False) for start, size in self._taken.items()]
        position, after_hole = 0, False
        for start, end, free in sorted(spans):
            assert start == position < end, f"gap or overlap at {position}: the next extent is {start}-{end}"
            assert not (free and after_hole), f"two free extents meet at {start}"
            position, after_hole = end, free
        assert position == self.capacity_bytes

    def _add_hole(self, start: int, end: int) -> None:
        if start < end:
            self._holes[start], self._starts[end] = end, start
            insort(self._by_size, (end - start, start))

    def _remove_hole(self, start: int) -> int:
        """Forget the hole, first where `take` finds it; returns its end."""
        end = self._holes[start]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
        del self._holes[start], self._starts[end]
        return end
