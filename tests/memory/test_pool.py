"""The pool: pieces never overlap, nothing is lost, and reuse waits for every last use."""

from __future__ import annotations

import itertools
import random
import threading
import time
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stormtorch.core.errors import OutOfBudget
from stormtorch.core.sizes import MiB
from stormtorch.core.tags import Tag, Tier
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.lanes.build import Lanes, open_lanes
from stormtorch.memory.lanes.lane import Delay
from stormtorch.memory.lanes.thread import CpuEvent, Failure
from stormtorch.memory.pools.host import HostPool
from stormtorch.memory.pools.pool import DevicePool, Piece


def opened(device: torch.device, ledger: Ledger, size: int, *, poison: bool = False) -> tuple[Lanes, DevicePool]:
    lanes = open_lanes(device)
    pool = DevicePool(device, ledger=ledger, tag=Tag.DATA, lanes=lanes, poison=lanes.store if poison else None)
    pool.grow(size)
    return lanes, pool


@settings(max_examples=40)
@given(moves=st.lists(st.tuples(st.booleans(), st.integers(1, 5000), st.integers(0, 100)), max_size=60))
def test_pieces_never_overlap_and_nothing_is_lost(moves: list[tuple[bool, int, int]]) -> None:
    from stormtorch.core.budget import Budget

    ledger = Ledger(*(Budget(tier=tier, limit_bytes=1 << 30, given="test") for tier in Tier))
    lanes, pool = opened(torch.device("cpu"), ledger, 32 * 512)
    out: list[Piece] = []
    for take, size, which in moves:
        if take:
            piece = pool.take(size, lanes.load)
            if piece is not None:
                assert piece.bytes.numel() == size
                out.append(piece)
        elif out:
            pool.give(out.pop(which % len(out)), lanes.load.record())
        spans = sorted((p.bytes.data_ptr(), p.bytes.data_ptr() + p.size) for p in out)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert pool.taken_bytes == sum(piece.size for piece in out)
        pool.check()
    for piece in out:
        pool.give(piece, lanes.load.record())
    assert pool.taken_bytes == 0
    pool.close()
    lanes.close()
    assert ledger.used_bytes(Tier.DEVICE) == 0


def test_whoever_takes_bytes_waits_for_all_their_last_uses(ledger: Ledger) -> None:
    lanes, pool = opened(torch.device("cpu"), ledger, 4096)
    source = torch.arange(512, dtype=torch.int64)
    halves = [pool.take(2048, lanes.store) for _ in range(2)]
    go, read = threading.Event(), list[bool]()
    for half in halves:  # two slow readers of what will be one piece
        assert half is not None
        lanes.store.enqueue(lambda: read.append(go.wait(60)))  # type: ignore[attr-defined]
        pool.give(half, lanes.store.record())
    whole = pool.take(4096, lanes.load)
    assert whole is not None
    assert not read, "the host must not wait"
    lanes.load.copy(whole.tensor(torch.int64, 512), source, Tag.DATA)
    copied = lanes.load.record()
    time.sleep(0.05)
    assert not copied.done(), "the lane must"
    go.set()
    lanes.load.synchronize()
    assert read == [True, True]
    pool.give(whole, lanes.load.record())
    pool.close()
    lanes.close()


def test_a_piece_that_is_dropped_returns_behind_all_that_was_asked_for(ledger: Ledger) -> None:
    """Ctrl-C has ended its holder between two lines."""
    lanes, pool = opened(torch.device("cpu"), ledger, 4096)
    piece = pool.take(4096, lanes.load)
    assert piece is not None
    read = threading.Event()
    lanes.store.enqueue(read.wait)  # type: ignore[attr-defined]  # it may be the piece that is read there
    del piece
    assert pool.taken_bytes == 0
    pool.check()
    again = pool.take(4096, lanes.load)  # the host does not wait
    assert again is not None
    ready = lanes.load.record()
    time.sleep(0.05)
    assert not ready.done(), "the lane must"
    read.set()
    ready.synchronize()
    pool.give(again)
    pool.close()
    lanes.close()


def test_ctrl_c_forgets_no_last_use(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a piece that was given back, and was about to be sorted in."""
    lanes, pool = opened(torch.device("cpu"), ledger, 4096)
    in_use = CpuEvent(Failure("side"))  # as of a stream of the user's, which no lane knows
    monkeypatch.setattr(lanes.compute, "record_at", lambda _place: in_use)
    piece = pool.take(4096, lanes.load)
    assert piece is not None
    lent = pool.lend(piece, [], {"side"})
    del piece, lent
    with monkeypatch.context() as patched:
        patched.setattr(pool, "_free", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pool.check()
    again = pool.take(4096, lanes.load)
    assert again is not None
    ready = lanes.load.record()
    time.sleep(0.05)
    assert not ready.done()
    in_use.reached.set()
    ready.synchronize()
    pool.give(again)
    pool.close()
    lanes.close()


def test_an_empty_piece_lies_nowhere(ledger: Ledger) -> None:
    """It is not in the way of the piece whose offset it has."""
    lanes, pool = opened(torch.device("cpu"), ledger, 4096)
    whole, empty = pool.take(4096, lanes.load), pool.take(0, lanes.load)
    assert whole is not None
    assert empty is not None
    assert whole.offset == empty.offset
    pool.give(empty)
    assert pool.taken_bytes == 4096
    pool.give(whole)
    assert pool.taken_bytes == 0
    pool.close()
    lanes.close()


def test_a_piece_that_is_given_twice_is_free_once(ledger: Ledger) -> None:
    """An interrupted call begins again; another piece may have the bytes by then."""
    lanes, pool = opened(torch.device("cpu"), ledger, 4096, poison=True)
    piece = pool.take(4096, lanes.compute)
    assert piece is not None
    pool.give(piece)
    pool.give(piece)
    assert pool.taken_bytes == 0
    other = pool.take(4096, lanes.compute)
    assert other is not None
    other.bytes.fill_(1)
    pool.give(piece)
    assert pool.taken_bytes == 4096
    lanes.synchronize()
    assert other.bytes.eq(1).all()
    pool.check()
    pool.give(other)
    pool.close()
    lanes.close()


def test_poison_comes_behind_the_last_use(device: torch.device, ledger: Ledger) -> None:
    lanes, pool = opened(device, ledger, 4096, poison=True)
    piece = pool.take(4096, lanes.compute)
    assert piece is not None
    piece.tensor(torch.float32, 1024).fill_(1)
    seen = piece.tensor(torch.float32, 1024).clone()
    memory = piece.bytes
    pool.give(piece, lanes.compute.record())
    assert pool.taken_bytes == 0  # sorted in, so poisoned
    lanes.synchronize()
    assert seen.eq(1).all()
    assert memory.view(torch.float32).isnan().all()
    pool.close()
    lanes.close()


def test_it_grows_within_the_budget_only(ledger: Ledger) -> None:
    lanes, pool = opened(torch.device("cpu"), ledger, 1024)
    assert pool.take(2048, lanes.load) is None
    pool.grow(2048)
    piece = pool.take(2048, lanes.load)
    assert piece is not None
    assert pool.capacity_bytes == 3072
    with pytest.raises(OutOfBudget, match="vram"):
        pool.grow(1 << 40)
    pool.give(piece, lanes.load.record())
    pool.close()
    lanes.close()


def test_a_single_block_serves_its_own_size_and_can_be_given_back(device: torch.device, ledger: Ledger) -> None:
    lanes, pool = opened(device, ledger, 4 * 512)
    pool.grow(3 * 512, single=True)
    ((address, size),) = pool.singles()
    assert size == 3 * 512
    other = pool.take(512, lanes.load)
    same = pool.take(3 * 512, lanes.load)
    assert other is not None
    assert same is not None
    assert other.bytes.data_ptr() != address == same.bytes.data_ptr()
    assert pool.give_back(address) == 0, "a piece of it is out"
    pool.give(same, lanes.load.record())
    del same
    assert pool.give_back(address) == 3 * 512
    assert pool.capacity_bytes == ledger.used_bytes(Tier.DEVICE) == 4 * 512
    assert pool.give_back() == 0
    pool.give(other, lanes.load.record())
    del other
    assert pool.give_back() == 4 * 512
    assert ledger.used_bytes(Tier.DEVICE) == 0
    lanes.synchronize()
    pool.close()
    lanes.close()


def test_what_is_given_back_is_behind_the_last_use_by_any_lane(ledger: Ledger) -> None:
    """Torch hands it to compute at once."""
    lanes, pool = opened(torch.device("cpu"), ledger, 512)
    piece = pool.take(512, lanes.load)
    assert piece is not None
    done = threading.Event()
    event = Mock(wraps=lanes.load.record(), done=lambda: False, synchronize=done.set)
    waited: list[object] = []
    lanes.compute.wait = waited.append  # type: ignore[method-assign, assignment]
    pool.give(piece, event)
    del piece
    assert pool.give_back() == 512
    assert event in waited
    pool.close()
    lanes.close()


def test_data_larger_than_the_pool_streams_through_it_with_delays(device: torch.device, ledger: Ledger) -> None:
    chance = random.Random(5)
    delay: Delay = (
        (lambda: time.sleep(chance.random() * 1e-3))
        if device.type == "cpu"
        else (lambda: torch.cuda._sleep(int(chance.random() * 1e6)))
    )
    lanes = open_lanes(device, delay=delay)
    pool = DevicePool(device, ledger=ledger, tag=Tag.PARAMETERS, lanes=lanes, poison=lanes.store)
    pool.grow(3 * 4096)
    gpu = device.type == "cuda"
    homes = [torch.full((1000,), float(i), pin_memory=gpu) for i in range(40)]
    results = [torch.zeros(1000, pin_memory=gpu) for _ in homes]
    for home, result in zip(homes, results, strict=True):
        piece = pool.take(4000, lanes.load)
        assert piece is not None
        data = piece.tensor(torch.float32, 1000)
        lanes.load.copy(data, home, Tag.PARAMETERS)
        lanes.compute.wait(lanes.load.record())
        data.add_(0.5)
        lanes.store.wait(lanes.compute.record())
        lanes.store.copy(result, data, Tag.PARAMETERS)
        pool.give(piece, lanes.store.record())
        pool.check()
    lanes.synchronize()
    assert all(bool((result == number + 0.5).all()) for number, result in enumerate(results))
    assert ledger.used_bytes(Tier.DEVICE) == 3 * 4096
    pool.close()
    lanes.close()


def test_the_host_may_run_ahead_but_the_bytes_do_not_grow(device: torch.device, ledger: Ledger) -> None:
    slow: Delay = (lambda: time.sleep(2e-3)) if device.type == "cpu" else (lambda: torch.cuda._sleep(4_000_000))
    lanes = open_lanes(device, delay=slow)
    pool = DevicePool(device, ledger=ledger, tag=Tag.PARAMETERS, lanes=lanes)
    pool.grow(2 * MiB)
    home = torch.ones(MiB, dtype=torch.uint8)
    home = home if device.type == "cpu" else home.pin_memory()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start_bytes = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    for _ in range(50):
        piece = pool.take(MiB, lanes.load)
        assert piece is not None, "the host is never refused for running ahead"
        lanes.load.copy(piece.bytes, home, Tag.PARAMETERS)
        pool.give(piece, lanes.load.record())
    assert not lanes.load.record().done(), "the host was not ahead: this test tested nothing"
    assert ledger.peak_bytes(Tier.DEVICE) == 2 * MiB
    if device.type == "cuda":
        assert torch.cuda.max_memory_allocated() == start_bytes
    lanes.synchronize()
    pool.close()
    lanes.close()


def test_host_memory_that_is_returned_twice_has_one_owner(ledger: Ledger) -> None:
    lanes = open_lanes("cpu", ledger=ledger)
    pool = HostPool(ledger=ledger, tag=Tag.ACTIVATIONS, lanes=lanes, page_lock=None)
    first = pool.room(4096, lanes.store)
    pool._returned.append((first, None))  # as its finalizer does, and then that of its holder
    pool.give(first)
    later = pool._returned.pop()  # on another thread, after the next owner has begun
    second = pool.room(4096, lanes.store)
    pool._returned.append(later)
    third = pool.room(4096, lanes.store)
    assert second.bytes.data_ptr() != third.bytes.data_ptr()
    pool.close()
    lanes.close()
