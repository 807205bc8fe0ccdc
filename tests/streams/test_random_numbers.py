"""States that are read from memory are those that ``getstate`` tells."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from stormtorch.streams.activations.recomputing import random_numbers
from stormtorch.streams.activations.recomputing.random_numbers import RandomNumbers, numpy_state

CPU = torch.device("cpu")


@pytest.mark.parametrize("draws", [0, 1, 623, 624, 625, 2000])
def test_pythons_state_is_read_from_memory(draws: int) -> None:
    for _ in range(draws):
        random.random()
    assert random_numbers._python_state is random_numbers._from_memory
    assert random_numbers._as_given(random_numbers._from_memory()) == random.getstate()


@pytest.mark.parametrize("by_memory", [True, False])
def test_restored_generators_draw_the_same_again(by_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not by_memory:
        monkeypatch.setattr(random_numbers, "_python_state", random.getstate)
    random.gauss(0, 1)  # keeps a second number for later
    before = RandomNumbers(CPU)
    assert before.same(RandomNumbers(CPU))
    drawn = random.gauss(0, 1), random.random(), torch.rand(3)
    assert not before.same(RandomNumbers(CPU))
    before.restore()
    assert before.same(RandomNumbers(CPU))
    again = random.gauss(0, 1), random.random(), torch.rand(3)
    assert drawn[:2] == again[:2]
    assert torch.equal(drawn[2], again[2])


def test_each_draw_is_noticed() -> None:
    for draw in (random.random, lambda: random.gauss(0, 1), lambda: torch.rand(1)):
        before = RandomNumbers(CPU)
        draw()
        assert not before.same(RandomNumbers(CPU))
    before_numpy = numpy_state()
    assert numpy_state() == before_numpy
    np.random.rand()
    assert numpy_state() != before_numpy
    kept = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        np.random.set_bit_generator(np.random.MT19937(1))  # type: ignore[attr-defined]
        other = numpy_state()
        np.random.rand()
        assert numpy_state() != other
    finally:
        np.random.set_bit_generator(kept)  # type: ignore[attr-defined]
