"""Allocates ranges inside one contiguous space: the sub-allocator behind the host arenas and the scratch files.

It deals in numbers only and owns no memory, so that the same code, and the same property tests, serve RAM and disk.

Best fit, with neighbours merged on release. Free holes are kept twice, by offset (to merge) and by size (to fit); both
are sorted lists, whose insertions are memmoves of a few hundred KiB even with 65,536 holes. The bytes skipped to align
an extent remain part of it: as holes of their own they would be too small for any request, and a search that meets
thousands of them takes minutes where this one takes a second. The road not taken: a buddy allocator, which needs no
search. Rounding to powers of two is the waste that this code exists to avoid.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from ...core.errors import SettingError
from ...core.sizes import parse_bytes, round_up

_TRIES = 8  # holes of just the right size to try before taking one that fits at any alignment


class Extents:
    """Free and taken extents of ``[0, capacity_bytes)``. Not thread-safe: the owner holds a lock."""

    def __init__(self, capacity_bytes: int, *, grain: int = 1) -> None:
        """Extents begin and end at multiples of ``grain``, or at the end of the space."""
        self.capacity_bytes, self.grain = capacity_bytes, grain
        self.taken_bytes = 0  # as asked for, without alignment
        self._holes: dict[int, int] = {}  # start -> size
        self._by_start: list[int] = []
        self._by_size: list[tuple[int, int]] = []
        self._taken: dict[int, tuple[int, int, int]] = {}  # aligned offset -> (start, end, size asked for)
        self._add_hole(0, capacity_bytes)

    def take(self, size: int, alignment: int) -> int | None:
        """Offset of ``size`` bytes at a multiple of ``alignment``, or None if no hole fits. Size 0 takes nothing."""
        size = parse_bytes(size)
        if size == 0:
            return 0
        if alignment < 1:
            raise SettingError(f"alignment={alignment} is not valid. Accepted: 1 or more.")
        start = self._find(size, alignment)
        if start is None:
            return None
        hole_end = start + self._remove_hole(start)
        offset = round_up(start, alignment)
        end = min(round_up(offset + size, self.grain), hole_end)
        self._add_hole(end, hole_end - end)
        self._taken[offset] = (start, end, size)
        self.taken_bytes += size
        return offset

    def give(self, offset: int, size: int) -> None:
        """Return an extent of ``take``. Size 0 returns nothing."""
        if size == 0:
            return
        start, end, asked = self._taken.pop(offset, (0, 0, -1))
        assert asked == size, f"extent {offset}+{size} is not taken"
        self.taken_bytes -= size
        index = bisect_left(self._by_start, start)
        if index < len(self._by_start) and self._by_start[index] == end:
            end += self._remove_hole(end)
        if index > 0:
            before = self._by_start[index - 1]
            if before + self._holes[before] == start:
                self._remove_hole(before)
                start = before
        self._add_hole(start, end - start)

    def restore(self, taken: Iterable[tuple[int, int]]) -> None:
        """Set the taken extents to these (offset, size), and no others, whatever an interrupted call has left behind.

        For owners that align to the grain and know which extents they have taken."""
        self.taken_bytes, position = 0, 0
        self._holes, self._by_start, self._by_size, self._taken = {}, [], [], {}
        for offset, size in sorted(taken):
            self._add_hole(position, offset - position)
            position = min(round_up(offset + size, self.grain), self.capacity_bytes)
            self._taken[offset] = (offset, position, size)
            self.taken_bytes += size
        self._add_hole(position, self.capacity_bytes - position)

    def check(self) -> None:
        """Assert conservation: taken and free extents tile the space, no two free ones touch."""
        assert self._by_size == sorted((size, start) for start, size in self._holes.items())
        assert self._by_start == sorted(self._holes)
        assert self.taken_bytes == sum(size for _, _, size in self._taken.values())
        spans = [(start, start + size, True) for start, size in self._holes.items()]
        for offset, (start, end, size) in self._taken.items():
            assert start <= offset < offset + size <= end, f"extent {offset}+{size} leaves its span {start}-{end}"
            spans.append((start, end, False))
        position, after_hole = 0, False
        for start, end, free in sorted(spans):
            assert start == position < end, f"gap or overlap at {position}: the next extent is {start}-{end}"
            assert not (free and after_hole), f"two free extents meet at {start}"
            position, after_hole = end, free
        assert position == self.capacity_bytes

    def _find(self, size: int, alignment: int) -> int | None:
        """Start of a hole for ``size`` aligned bytes: nearly the smallest, found without walking through all."""
        first = bisect_left(self._by_size, (size, 0))
        sure = bisect_left(self._by_size, (size + alignment - 1, 0))  # fits at any start
        for candidates in (
            range(first, min(sure, first + _TRIES)),
            range(sure, len(self._by_size)),
            range(first, sure),
        ):
            for index in candidates:
                hole_size, start = self._by_size[index]
                if round_up(start, alignment) + size <= start + hole_size:
                    return start
        return None

    def _add_hole(self, start: int, size: int) -> None:
        if size:
            self._holes[start] = size
            insort(self._by_start, start)
            insort(self._by_size, (size, start))

    def _remove_hole(self, start: int) -> int:
        size = self._holes.pop(start)
        del self._by_start[bisect_left(self._by_start, start)]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        return size
