"""The ring for gradients, by itself: a part is lent again only behind the updates that read it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stormtorch.core.budget import Budget
from stormtorch.core.errors import OutOfBudget
from stormtorch.core.tags import Tag, Tier
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.host.arena import PAGE, HostArena
from stormtorch.streams.gradients.memory import GradRing
from stormtorch.streams.units.sizes import homes_for, ring_bytes_for
from stormtorch.streams.units.unit import Unit


class Gate:
    """Of a unit: counts its updates, and those that the store lane was told to wait for."""

    def __init__(self) -> None:
        self.updates = self.waited_for = 0

    def hold(self, _lane: Any) -> None:
        self.waited_for = self.updates


def units_of(*counts: int) -> list[Unit]:
    return [Unit(i, f"u{i}", [("w", nn.Parameter(torch.zeros(count)))]) for i, count in enumerate(counts)]


def ledger_of(limit: int) -> Ledger:
    return Ledger(Budget(tier=Tier.HOST, limit_bytes=limit, given=f"ram={limit}"))


def ring_of(units: list[Unit], size: int, ledger: Ledger) -> GradRing:
    return GradRing(units, lambda capacity: HostArena(capacity, ledger=ledger, tag=Tag.GRADIENTS), size)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.data())
def test_no_part_is_lent_before_its_readers_were_waited_for(counts: list[int], data: st.DataObject) -> None:
    units = units_of(*counts)
    least, whole = max(unit.grad_bytes for unit in units), sum(unit.grad_bytes for unit in units)
    size = data.draw(st.integers(least // 64, max(least, whole) // 64)) * 64
    ring = ring_of(units, size, ledger_of(1 << 20))
    lent: list[tuple[int, int, Gate, int]] = []  # where, and which update of which unit reads it
    gates: list[Any] = [Gate() for _ in units]
    for index in data.draw(st.lists(st.integers(0, len(units) - 1), max_size=40)):
        gate = gates[index]
        part = ring.lend(units[index], gate, None)  # type: ignore[arg-type]
        start, end = part.data_ptr(), part.data_ptr() + part.nbytes
        assert part.nbytes == units[index].grad_bytes
        assert start % 64 == 0
        readers = [(gate, update) for first, last, gate, update in lent if first < end and start < last]
        assert all(reader.waited_for >= update for reader, update in readers)
        assert gate.waited_for == gate.updates, "two updates of a unit at the same time"
        gate.updates += 1
        lent.append((start, end, gate, gate.updates))
    out = sum(end - start for start, end, gate, update in lent if gate.waited_for < update)
    assert out <= size, "more is out than there is"


def test_the_ring_has_room_for_the_two_largest_and_for_a_sixteenth() -> None:
    assert ring_bytes_for(units_of(1000)) == 4032, "whole tensors of 64 bytes"
    assert ring_bytes_for(units_of(64, 1000, 512, 64)) == 4032 + 2048
    assert ring_bytes_for(units_of(*[64] * 64)) == 4 * 256
    assert ring_bytes_for(units_of(*[64] * 24)) == 2 * 256


@pytest.mark.parametrize("in_backward", [False, True])
def test_what_is_needed_at_once_is_planned(in_backward: bool) -> None:
    units = units_of(*[4096] * 64)
    homes = homes_for(units, ledger_of(1 << 30), optimizer=True, adam=True, in_backward=in_backward)
    whole = sum(unit.grad_bytes for unit in units)
    assert homes.needed[Tag.GRADIENTS] == whole
    assert homes.ring_bytes == 0
    short = ledger_of(sum(homes.needed.values()) - 1)
    if in_backward:
        ring = homes_for(units, short, optimizer=True, adam=True, in_backward=True)
        assert ring.needed[Tag.GRADIENTS] == ring.ring_bytes == whole // 16
    else:
        with pytest.raises(OutOfBudget, match="Cannot hold this model"):
            homes_for(units, short, optimizer=True, adam=True, in_backward=False)
    frozen = homes_for(units, ledger_of(1 << 30), optimizer=False, adam=False, in_backward=in_backward)
    assert frozen.ring_bytes == frozen.needed[Tag.GRADIENTS] == 0


def test_a_home_beside_the_ring_is_taken_once_and_refused_in_words() -> None:
    units = units_of(2048, 2048, 2048)
    ledger = ledger_of(3 * 8192 + PAGE)
    ring = ring_of(units, 2 * 8192, ledger)
    ring.prepare()
    ring.prepare()
    assert ledger.used_bytes(Tier.HOST, Tag.GRADIENTS) == 2 * 8192
    assert ring.own(units[0]).data_ptr() == ring.own(units[0]).data_ptr()
    assert ledger.used_bytes(Tier.HOST, Tag.GRADIENTS) == 3 * 8192
    assert [ring.home_bytes_of(unit) for unit in units] == [8192, 0, 0]
    with pytest.raises(OutOfBudget, match=r"gradients of 'u1' in RAM.*step=\"backward\" has RAM for gradients only"):
        ring.own(units[1])


def test_a_spent_gradient_has_a_form_and_takes_no_ram() -> None:
    ledger = ledger_of(1 << 20)
    units = units_of(64)
    ring = ring_of(units, units[0].grad_bytes, ledger)
    spent = ring.spent(units[0].places[0])
    assert (spent.shape, spent.dtype) == ((64,), torch.float32)
    assert ledger.used_bytes(Tier.HOST) == 0
