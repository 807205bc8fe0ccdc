from __future__ import annotations

import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormtorch.memory.books.extents import Extents

CAPACITY = 4096
operations = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, CAPACITY // 4), st.sampled_from([1, 16, 64, 512])),
        st.tuples(st.just("give"), st.integers(0, 1 << 30), st.just(0)),
    ),
    max_size=120,
)


@settings(max_examples=200, deadline=None)
@given(operations, st.sampled_from([1, 16]))
def test_nothing_overlaps_nothing_leaks(steps: list[tuple[str, int, int]], grain: int) -> None:
    extents, live = Extents(CAPACITY, grain=grain), dict[int, int]()
    for kind, number, alignment in steps:
        if kind == "take":
            offset = extents.take(number, alignment)
            if number == 0:
                assert offset == 0
            elif offset is not None:
                assert offset % alignment == 0
                assert offset + number <= CAPACITY
                assert all(offset + number <= o or o + s <= offset for o, s in live.items()), "overlaps a live extent"
                live[offset] = number
            else:
                assert not fits_anywhere(extents, number, alignment), "refused although a hole is large enough"
        elif live:
            offset = sorted(live)[number % len(live)]
            extents.give(offset, live.pop(offset))
        extents.check()
        assert extents.taken_bytes == sum(live.values())
    for offset, size in live.items():
        extents.give(offset, size)
    extents.check()
    assert extents.take(CAPACITY, 1) == 0, "all of the space is one hole again"


@given(st.lists(st.integers(1, 200), max_size=40), st.integers(0, 1 << 40), st.integers(0, 7))
def test_what_is_known_to_be_taken_can_be_restored(sizes: list[int], which: int, step: int) -> None:
    """Ctrl-C has come in the middle of a call, at ``step``: the lists do not fit together any more."""
    extents = Extents(4096, grain=16)
    taken = {offset: size for size in sizes if (offset := extents.take(size, 16)) is not None}
    for number, offset in enumerate(list(taken)):
        if which >> number & 1:
            extents.give(offset, taken.pop(offset))
    lists: list[Any] = [extents._holes, extents._by_start, extents._by_size, extents._taken]
    lists[step % 4].clear()
    extents.restore(taken.items())
    extents.check()
    assert extents.taken_bytes == sum(taken.values())
    for offset, size in taken.items():
        extents.give(offset, size)
    extents.check()
    assert extents.take(4096, 16) == 0


def fits_anywhere(extents: Extents, size: int, alignment: int) -> bool:
    spans = [(start, end) for start, end, _ in extents._taken.values()]  # with the bytes skipped to align them
    candidates = range(0, CAPACITY - size + 1, alignment)
    return any(all(c + size <= start or end <= c for start, end in spans) for c in candidates)


@pytest.mark.parametrize("grain", [1, 16])
def test_65536_holes_are_quick_to_search(grain: int) -> None:
    extents = Extents(1 << 30, grain=grain)
    chance = random.Random(1)
    offsets = [(extents.take(size, 16), size) for size in (chance.randrange(1, 16384) for _ in range(65536))]
    chance.shuffle(offsets)
    for offset, size in offsets[:32768]:
        assert offset is not None
        extents.give(offset, size)
    start_s = time.perf_counter()
    again = [extents.take(chance.randrange(1, 8192), chance.choice([1, 16, 64, 4096])) for _ in range(32768)]
    assert None not in again
    assert time.perf_counter() - start_s < 20, "a search walks through the holes"
    extents.check()
