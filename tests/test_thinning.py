"""A part of a grid stands for all of it."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

import pytest

from .thinning import thinned


def grid(*sizes: int) -> dict[str, set[Hashable]]:
    return {str(case): set(enumerate(case)) for case in itertools.product(*map(range, sizes))}


@pytest.mark.parametrize(("sizes", "most"), [((7,), 7), ((2, 2, 2), 5), ((2, 10), 14), ((3, 4, 5, 2), 40), ((30,), 30)])
def test_every_value_is_there(sizes: tuple[int, ...], most: int) -> None:
    cases = grid(*sizes)
    kept = thinned(cases)
    assert {value for name in kept for value in cases[name]} == {value for case in cases.values() for value in case}
    assert len(kept) <= most
    assert kept == thinned(dict(reversed(cases.items())))
