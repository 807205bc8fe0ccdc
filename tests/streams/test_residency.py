"""Which copy ends when something else needs the room, on the CPU's lanes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from stormtorch.core.errors import OutOfBudget
from stormtorch.core.tags import Tag
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.lanes.build import Lanes, open_lanes
from stormtorch.memory.pools.pool import DevicePool, Piece
from stormtorch.streams.units.partition import partition
from stormtorch.streams.weights.graph_twins import GraphTwins
from stormtorch.streams.weights.residency import Residence, Residency
from stormtorch.streams.weights.stream import ParameterStream

UNITS = 6
SIZE = 32 * 32 * 4  # bytes of a unit, in whole grains


@dataclass
class World:
    """Six equal units, and a pool for three of them."""

    lanes: Lanes
    pool: DevicePool
    residency: Residency
    weights: ParameterStream
    enlarged: list[int]

    def load(self, *indices: int) -> None:
        for index in indices:
            assert self.weights.load(self.residency.residences[index], 0) is not None

    def there(self) -> set[int]:
        return {r.unit.index for r in self.residency.residences if r.stay is not None}

    def room(self, units: int = 1) -> Piece:
        return self.residency.room(units * SIZE, self.lanes.compute, Tag.GRADIENTS)


@pytest.fixture
def world(ledger: Ledger) -> Iterator[World]:
    device = torch.device("cpu")
    lanes = open_lanes(device, ledger=ledger)
    pool = DevicePool(device, ledger=ledger, tag=Tag.PARAMETERS, lanes=lanes)
    pool.grow(3 * SIZE)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(UNITS)))
    units = partition(model, unit_limit_bytes=SIZE, only=None, leave=[]).units
    assert [unit.image_bytes for unit in units] == [SIZE] * UNITS
    enlarged: list[int] = []

    def enlarge(size: int) -> bool:
        enlarged.append(size)
        return False

    residences = [Residence(unit, torch.full((SIZE,), unit.index, dtype=torch.uint8)) for unit in units]
    residency = Residency(residences, pool=pool, ledger=ledger, twins=GraphTwins(torch.empty(0)), enlarge=enlarge)

    weights = ParameterStream(residency, lanes=lanes, sink=lambda _span: None, serial=True)
    yield World(lanes, pool, residency, weights, enlarged)
    residency.forget()
    pool.close()  # asks the lanes when pieces that were dropped are free
    lanes.close()


def test_the_farthest_next_use_is_evicted(world: World) -> None:
    world.load(0, 1, 2)
    world.residency.order.visit(0)  # before the first pass, forward in the model's order is predicted
    world.load(3)
    assert world.there() == {1, 2, 3}, "0 was used just now"


def test_a_prefetch_evicts_only_what_is_used_later(world: World) -> None:
    world.load(0, 1, 2)
    world.residency.order.visit(0)
    far = max(world.residency.order.distance(index) for index in range(3))
    assert world.residency.try_room(SIZE, world.lanes.load, far) is None
    assert world.there() == {0, 1, 2}
    assert world.residency.try_room(SIZE, world.lanes.load, far - 1) is not None
    assert len(world.there()) == 2


def test_units_that_compute_and_the_one_in_use_remain(world: World) -> None:
    world.load(0, 1, 2)
    residences = world.residency.residences
    residences[0].installed = residences[1].installed = 1
    world.residency.current = residences[2]
    held = world.room()
    assert world.there() == {0, 1}, "the unit in use goes last, where modules compute with all others"
    with pytest.raises(OutOfBudget, match="by modules that are computing"):
        world.room()
    assert world.enlarged == [SIZE]
    world.residency.give(held)


def test_kept_units_give_way_to_demand_alone(world: World) -> None:
    world.residency.kept = frozenset({0, 1, 2})
    world.weights.load_kept()
    assert world.there() == {0, 1, 2}
    assert world.residency.try_room(SIZE, world.lanes.load, 0.5) is None
    piece = world.room()
    assert len(world.there()) == 2
    world.residency.give(piece)


def test_a_stale_copy_goes_first(world: World) -> None:
    world.load(0, 1, 2)
    world.residency.order.visit(0)
    nearest = min(range(3), key=world.residency.order.distance)
    world.residency.residences[nearest].version += 1
    world.room()
    assert nearest not in world.there()


def test_a_borrower_gives_way_when_nothing_else_does(world: World) -> None:
    pieces = [world.room(), world.room(), world.room()]

    class Holds:
        """Returns one piece each time it is asked."""

        asked = 0

        def give_way(self) -> bool:
            self.asked += 1
            if not pieces:
                return False
            world.residency.give(pieces.pop())
            return True

    borrower = Holds()
    world.residency.borrowers.append(borrower)
    held = [world.room(), world.room(), world.room()]
    assert (borrower.asked, len(world.enlarged)) == (3, 3), "the budget is asked first"
    with pytest.raises(OutOfBudget, match="GRADIENTS"):
        world.room()
    world.residency.give(held.pop())
    assert world.room().size == SIZE
    assert borrower.asked == 4


def test_bytes_of_a_dropped_copy_remain_as_long_as_a_view(world: World) -> None:
    world.load(0, 1, 2)
    stay = world.residency.residences[0].stay
    assert stay is not None
    view = stay.base[:16]
    del stay
    world.residency.drop_all()
    assert world.there() == set()
    world.load(3, 4, 5)
    assert len(world.there()) == 2, "the third had no room beside the view's bytes"
    assert (view == 0).all()
    del view
    world.load(*{3, 4, 5} - world.there())
    assert world.there() == {3, 4, 5}


def test_a_copy_is_found_by_its_address(world: World) -> None:
    world.load(0, 1)
    stay = world.residency.residences[1].stay
    assert stay is not None
    assert world.weights.residence_of(stay.base) is world.residency.residences[1]
    assert world.residency.drop_at(stay.memory.data_ptr()) == 1
    assert world.residency.drop_at(stay.memory.data_ptr()) is None
    # What autograd saves of it is still a weight, which can be loaded again, unless that has changed since.
    assert world.weights.residence_of(stay.base) is world.residency.residences[1]
    world.weights.changed(world.residency.residences[1].unit, by_step=False)
    assert world.weights.residence_of(stay.base) is None


def test_a_dropped_copy_that_is_still_shown_is_taken_back(world: World) -> None:
    residence = world.residency.residences[1]
    world.load(0, 1)
    assert residence.stay is not None
    shown = residence.stay.base[:8]
    loads = residence.loads
    world.residency.drop(residence)
    assert residence.stay is None
    world.load(1)
    assert residence.stay is not None
    assert residence.loads == loads
    assert residence.stay.base.untyped_storage().data_ptr() == shown.untyped_storage().data_ptr()
    assert torch.equal(residence.stay.base, residence.image)
    world.weights.changed(residence.unit, by_step=False)
    world.residency.drop(residence)
    world.load(1)  # the home image has other values since
    assert residence.loads == loads + 1
    assert residence.stay.base.data_ptr() != shown.data_ptr()
    world.residency.drop(residence)
    del shown
    world.load(1)  # the last view of the dropped copy is gone
    assert residence.loads == loads + 2
