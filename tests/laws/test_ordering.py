"""The clocks of ordering.py, and what happens_before.py makes of lanes and operations, in examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from stormtorch.core.tags import Tag
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.host.arena import HostArena
from stormtorch.memory.lanes.build import Lanes, open_lanes
from stormtorch.memory.lanes.flags import Flags

from .checker import Checker
from .happens_before import CheckedLane, checking
from .ordering import HOST, Access, Clocks, Memory

CPU = torch.device("cpu")


def use(clocks: Clocks, memory: Memory, actor: str, start: int, stop: int, *, writes: bool) -> list[str]:
    """The actors of the accesses that this one is not ordered with."""
    clock = clocks.ask(actor)
    access = Access(actor, clock[actor], writes, "")
    return [earlier.actor for earlier in memory.use(start, stop, access, clock)]


def test_only_writes_conflict_and_only_where_they_overlap() -> None:
    clocks, memory = Clocks(), Memory()
    assert not use(clocks, memory, "a", 0, 10, writes=False)
    assert not use(clocks, memory, "b", 5, 15, writes=False)
    assert not use(clocks, memory, "c", 15, 20, writes=True)
    assert use(clocks, memory, "c", 0, 5, writes=True) == ["a"]
    assert sorted(use(clocks, memory, "d", 9, 16, writes=True)) == ["a", "b", "b", "c"]
    assert use(clocks, memory, "e", 0, 20, writes=False) == ["c", "d", "c"]


def test_a_point_orders_what_came_before_it_and_nothing_after() -> None:
    clocks, memory = Clocks(), Memory()
    use(clocks, memory, "a", 0, 10, writes=True)
    clocks.see("b", clocks.point("a"))
    assert not use(clocks, memory, "b", 0, 10, writes=False)
    use(clocks, memory, "a", 20, 30, writes=True)
    assert use(clocks, memory, "b", 20, 30, writes=False) == ["a"]


def test_order_passes_through_a_third() -> None:
    clocks, memory = Clocks(), Memory()
    use(clocks, memory, "a", 0, 10, writes=True)
    clocks.see("b", clocks.point("a"))
    clocks.see("c", clocks.point("b"))
    assert not use(clocks, memory, "c", 0, 10, writes=True)


def test_the_host_asks_for_work_and_then_does_not_wait_for_it() -> None:
    clocks, memory = Clocks(), Memory()
    assert not use(clocks, memory, HOST, 0, 10, writes=True)
    assert not use(clocks, memory, "a", 0, 10, writes=False), "it was asked afterwards"
    assert use(clocks, memory, HOST, 0, 10, writes=True) == ["a"]
    point = clocks.point("a")
    assert not clocks.has_seen(HOST, point)
    clocks.see(HOST, point)
    assert clocks.has_seen(HOST, point)
    assert not use(clocks, memory, HOST, 0, 10, writes=True)
    assert not use(clocks, memory, "b", 0, 10, writes=True), "what the host has seen, all have that it asks later"


def test_what_the_host_does_after_asking_is_not_seen() -> None:
    clocks, memory = Clocks(), Memory()
    use(clocks, memory, "a", 50, 60, writes=True)
    use(clocks, memory, HOST, 0, 10, writes=True)
    earlier = clocks.point("a")
    use(clocks, memory, HOST, 0, 10, writes=True)
    assert not use(clocks, memory, "a", 0, 10, writes=False)
    clocks.see("b", earlier)
    assert not use(clocks, memory, "b", 0, 10, writes=False)


@pytest.fixture
def checker() -> Iterator[Checker]:
    with checking() as checker:
        yield checker


@pytest.fixture
def lanes(checker: Checker) -> Iterator[Lanes]:
    lanes = open_lanes(CPU)
    load, store, compute, aside = (
        CheckedLane(checker, lane) for lane in (lanes.load, lanes.store, lanes.compute, lanes.aside)
    )
    yield Lanes(CPU, load, store, compute, aside)
    lanes.close()


@pytest.fixture
def home(checker: Checker, ledger: Ledger) -> Iterator[torch.Tensor]:
    assert not checker.races  # it must be there before the arena is
    arena = HostArena(4096, ledger=ledger, tag=Tag.STAGING)
    yield arena.tensor((16,), torch.float32)
    arena.close()


def test_an_operation_on_what_a_lane_loads(checker: Checker, lanes: Lanes, home: torch.Tensor) -> None:
    there = torch.empty(16)
    lanes.load.copy(there, home, Tag.PARAMETERS)
    lanes.compute.wait(lanes.load.record())
    there.sum()
    checker.check()
    lanes.load.copy(there, home, Tag.PARAMETERS)
    there.sum()
    assert len(checker.races) == 2, "the copy may come too early as well"
    with pytest.raises(AssertionError, match="compute reads sum"):
        checker.check()


def test_an_operation_that_overwrites_what_a_lane_stores(checker: Checker, lanes: Lanes, home: torch.Tensor) -> None:
    there = torch.ones(16)
    lanes.store.wait(lanes.compute.record())
    lanes.store.copy(home, there, Tag.GRADIENTS)
    stored = lanes.store.record()
    there.sum()
    checker.check()
    assert not stored.done(), "nothing says that it is"
    torch.mul(there, 2, out=there)
    assert len(checker.races) == 1
    stored.synchronize()
    assert stored.done()


def test_the_host_reads_home_memory_itself(checker: Checker, lanes: Lanes, home: torch.Tensor) -> None:
    there = torch.ones(16)
    lanes.store.wait(lanes.compute.record())
    lanes.store.copy(home, there, Tag.GRADIENTS)
    lanes.compute.wait(lanes.store.record())  # which holds back no host
    home.sum()
    assert "host reads sum" in str(checker.races[0])


def test_a_flag_orders_lanes(checker: Checker, lanes: Lanes, home: torch.Tensor, ledger: Ledger) -> None:
    board = Flags(1, ledger=ledger, device=CPU)
    there, back = torch.ones(16), torch.empty(16)
    lanes.store.wait(lanes.compute.record())
    lanes.store.copy(home, there, Tag.GRADIENTS)
    lanes.store.write_flag(board[0], 1)
    assert not board[0].at(1).reached(), "nothing says that it is"
    lanes.load.wait_flag(board[0], 1)
    lanes.load.copy(back, home, Tag.GRADIENTS)
    checker.check()
    lanes.aside.copy(back, home, Tag.GRADIENTS)
    assert len(checker.races) == 2, "of home and of its copy"
    assert board[0].wait(1)
    assert board[0].at(1).reached()
    lanes.synchronize()
    board.close()


def test_a_check_of_nothing_says_so(checker: Checker) -> None:
    with pytest.raises(AssertionError, match="nothing was looked at"):
        checker.check()


def test_nothing_is_changed_afterwards() -> None:
    before = HostArena._add
    with checking():
        assert HostArena._add is not before
    assert HostArena._add is before
