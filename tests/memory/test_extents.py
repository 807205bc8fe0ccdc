from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormtorch.core.sizes import round_up
from stormtorch.memory.books.extents import Extents

CAPACITY = 4096
operations = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, CAPACITY // 4)),
        st.tuples(st.just("give"), st.integers(0, 1 << 30)),
    ),
    max_size=120,
)


@settings(max_examples=200)
@given(operations, st.sampled_from([1, 16]))
def test_nothing_overlaps_nothing_leaks(steps: list[tuple[str, int]], grain: int) -> None:
    extents, live = Extents(CAPACITY, grain=grain), dict[int, int]()
    for kind, number in steps:
        if kind == "take":
            offset = extents.take(number)
            if number == 0:
                assert offset == 0
            elif offset is not None:
                assert offset % grain == 0
                assert offset + number <= CAPACITY
                assert all(offset + number <= o or o + s <= offset for o, s in live.items()), "overlaps a live extent"
                live[offset] = number
            else:
                assert not fits_anywhere(extents, number, grain), "refused although a hole is large enough"
        elif live:
            offset = sorted(live)[number % len(live)]
            extents.give(offset, live.pop(offset))
        extents.check()
        assert extents.taken_bytes == sum(live.values())
    for offset, size in live.items():
        extents.give(offset, size)
    extents.check()
    assert extents.take(CAPACITY) == 0, "all of the space is one hole again"


def fits_anywhere(extents: Extents, size: int, grain: int) -> bool:
    spans = [(start, start + round_up(size, grain)) for start, size in extents._taken.items()]
    candidates = range(0, CAPACITY - size + 1, grain)
    return any(all(c + size <= start or end <= c for start, end in spans) for c in candidates)


@pytest.mark.parametrize("grain", [1, 16])
def test_65536_holes_are_quick_to_search(grain: int) -> None:
    extents = Extents(1 << 30, grain=grain)
    chance = random.Random(1)
    offsets = [(extents.take(size), size) for size in (chance.randrange(1, 16384) for _ in range(65536))]
    chance.shuffle(offsets)
    for offset, size in offsets[:32768]:
        assert offset is not None
        extents.give(offset, size)
    start_s = time.perf_counter()
    again = [extents.take(chance.randrange(1, 8192)) for _ in range(32768)]
    assert None not in again
    assert time.perf_counter() - start_s < 20, "a search walks through the holes"
    extents.check()
