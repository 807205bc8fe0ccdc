from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import threading
import time
import warnings
import weakref
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stormtorch.core.budget import Budget
from stormtorch.core.errors import OutOfBudget, SettingError, StormError
from stormtorch.core.sizes import GiB, MiB, round_up
from stormtorch.core.tags import Tag, Tier
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.host.arena import PAGE, HostArena, Place, SharedArena, regions_for
from stormtorch.memory.host.pinning import page_lock_for
from stormtorch.memory.host.region import Region, map_private


class RecordingLock:
    """Locks nothing, remembers everything; refuses what is asked of it after ``allow`` calls."""

    def __init__(self, allow: int = 1 << 30) -> None:
        self.allow, self.locked = allow, dict[int, int]()

    def lock(self, address: int, size: int) -> None:
        if len(self.locked) >= self.allow:
            raise StormError("CUDA_ERROR_OUT_OF_MEMORY")
        self.locked[address] = size

    def unlock(self, address: int) -> None:
        del self.locked[address]


def roomy() -> Ledger:
    return Ledger(Budget(tier=Tier.HOST, limit_bytes=GiB, given="ram='1GiB'"))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 40_000), st.sampled_from([None, 1, 512, 4096])), max_size=60))
def test_tensors_never_overlap_and_keep_their_bytes(sizes: list[tuple[int, int | None]]) -> None:
    ledger = roomy()
    arena = HostArena(256 * 1024, ledger=ledger, tag=Tag.PARAMETERS)
    made: list[tuple[torch.Tensor, int]] = []
    for number, (size, alignment) in enumerate(sizes):
        try:
            tensor = arena.tensor((size,), torch.uint8, alignment=alignment)
        except OutOfBudget:
            assert arena.taken_bytes + size > 64 * 1024, "refused although the arena is almost empty"
            continue
        assert tensor.numel() == size
        if size:
            assert tensor.data_ptr() % (alignment or 16) == 0
        made.append((tensor.fill_(number % 251), number % 251))
        assert arena.taken_bytes == sum(tensor.numel() for tensor, _ in made)
        for tensor, value in made:
            assert bool((tensor == value).all()), "a neighbour wrote into this tensor"
    arena.close()
    assert ledger.used_bytes(Tier.HOST) == 0


def test_overhead_for_65536_tensors_of_mixed_sizes_is_at_most_one_per_cent(ledger: Ledger) -> None:
    chance = random.Random(0)
    sizes = [0 if chance.random() < 0.05 else int(2 ** chance.uniform(1, 16)) for _ in range(65536)]
    capacity = regions_for(sizes)
    before = psutil.Process().memory_info().rss
    arena = HostArena(capacity, ledger=ledger, tag=Tag.PARAMETERS)
    places = [arena.allocate(size) for size in sizes]
    assert arena.taken_bytes == sum(sizes)
    assert ledger.used_bytes(Tier.HOST) == arena.capacity_bytes <= 1.01 * sum(sizes)
    grown = psutil.Process().memory_info().rss - before
    assert grown <= 1.01 * sum(sizes) + 32 * MiB, (
        "more memory was touched than the ledger says"
    )  # Python's own handles: 32 MiB
    del places
    arena.close()


def test_planned_capacity_is_exact(ledger: Ledger) -> None:
    sizes = [5000, 0, 3, 70_000, 4096, 17, 2048]
    arena = HostArena(regions_for(sizes), ledger=ledger, tag=Tag.PARAMETERS)
    for size in sizes:
        arena.allocate(size)
    assert arena.capacity_bytes == round_up(5008 + 16 + 70_000 + 4096 + 32 + 2048, PAGE)
    with pytest.raises(OutOfBudget, match="no region has room"):
        arena.allocate(PAGE)
    arena.close()


def test_capacity_is_exact_across_regions_too(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stormtorch.memory.host.arena._REGION_LIMIT", 16 * PAGE)
    sizes = [10 * PAGE, 10 * PAGE, 3 * PAGE, 16 * PAGE]
    arena = HostArena(regions_for(sizes), ledger=ledger, tag=Tag.PARAMETERS)
    for size in sizes:
        arena.allocate(size)
    with pytest.raises(SettingError, match="in one piece"):
        arena.allocate(17 * PAGE)
    arena.close()


@pytest.mark.parametrize("bad", [-16, 1.5, None])
def test_a_size_that_cannot_be_meant_changes_nothing(ledger: Ledger, bad: int) -> None:
    arena = HostArena(MiB, ledger=ledger, tag=Tag.PARAMETERS)
    with pytest.raises(SettingError, match="size="):
        arena.allocate(bad)
    with pytest.raises(SettingError, match="size="):
        arena.tensor((4, bad), torch.float32)
    with pytest.raises(SettingError, match="size="):
        HostArena(bad, ledger=ledger, tag=Tag.PARAMETERS)
    assert arena.taken_bytes == 0
    arena.close()


def test_the_charge_comes_before_the_memory() -> None:
    ledger = Ledger(Budget(tier=Tier.HOST, limit_bytes=MiB, given="ram='1MiB'"))
    before = psutil.Process().memory_info().vms
    with pytest.raises(OutOfBudget, match="ram='1MiB'"):
        HostArena(8 * GiB, ledger=ledger, tag=Tag.OPTIMIZER)
    assert psutil.Process().memory_info().vms - before < GiB
    assert ledger.used_bytes(Tier.HOST) == 0


def test_memory_is_zero_typed_and_shaped(ledger: Ledger) -> None:
    arena = HostArena(MiB, ledger=ledger, tag=Tag.OPTIMIZER)
    tensor = arena.tensor((3, 5), torch.bfloat16)
    assert tensor.shape == (3, 5)
    assert tensor.dtype == torch.bfloat16
    assert not tensor.any()
    assert arena.tensor((0, 7), torch.float32).shape == (0, 7)
    assert arena.tensor((), torch.float64).shape == ()
    arena.close()


def test_a_tensor_outlives_its_arena(ledger: Ledger) -> None:
    arena = HostArena(MiB, ledger=ledger, tag=Tag.PARAMETERS)
    tensor = arena.tensor((100,), torch.int32)
    tensor.fill_(7)
    arena.close()
    del arena
    gc.collect()
    assert int(tensor.sum()) == 700
    tensor.fill_(8)


def test_a_dropped_arena_goes_with_its_last_tensor() -> None:
    ledger, lock = roomy(), RecordingLock()
    arena = HostArena(MiB, ledger=ledger, tag=Tag.PARAMETERS, page_lock=lock)
    view = arena.tensor((100,), torch.int32)[50:]
    assert list(lock.locked.values()) == [MiB]
    del arena
    gc.collect()
    assert list(lock.locked.values()) == [MiB], "a copy of this view would be slow, and nothing would tell why"
    assert ledger.used_bytes(Tier.HOST) == ledger.pinned_bytes == MiB
    del view
    gc.collect()
    assert lock.locked == {}
    assert ledger.used_bytes(Tier.HOST) == ledger.pinned_bytes == 0


def test_an_arena_of_nothing(ledger: Ledger) -> None:
    arena = HostArena(0, ledger=ledger, tag=Tag.PARAMETERS, page_lock=RecordingLock())
    assert arena.tensor((0,), torch.uint8).numel() == 0
    assert arena.pinned
    arena.close()


def test_a_closed_arena_refuses(ledger: Ledger) -> None:
    arena = HostArena(MiB, ledger=ledger, tag=Tag.PARAMETERS, page_lock=RecordingLock())
    arena.close()
    arena.close()
    assert not arena.pinned
    with pytest.raises(StormError, match="closed"):
        arena.allocate(1)


def test_refused_page_lock_stays_pageable_and_is_said_once_with_its_limit(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        arena = HostArena(MiB, ledger=ledger, tag=Tag.PARAMETERS, page_lock=RecordingLock(allow=0))
        assert not arena.pinned
        assert ledger.pinned_bytes == 0
        arena.tensor((10,), torch.float32).fill_(1)
        arena.close()
    assert len(caplog.messages) == 1
    assert "Host page-lock refused for 1.0 MiB" in caplog.messages[0]
    assert "the limit is" in caplog.messages[0]
    assert "CUDA out of memory" not in caplog.messages[0]


def test_a_region_is_locked_while_the_next_one_is_touched(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time that opening a session takes is touching, the other half is locking."""
    monkeypatch.setattr("stormtorch.memory.host.arena._REGION_AIM", 8 * PAGE)
    sizes = [5 * PAGE, 5 * PAGE, 2 * PAGE, 9 * PAGE]
    touched = threading.Semaphore(0)

    class AfterTheNext(RecordingLock):
        def lock(self, address: int, size: int) -> None:
            if not self.locked:
                assert all(touched.acquire(timeout=300) for _ in range(3)), "nothing is touched while this waits"
            super().lock(address, size)

    monkeypatch.setattr("stormtorch.memory.host.arena.first_touch", lambda _address, _size: touched.release())
    lock = AfterTheNext()
    arena = HostArena(regions_for(sizes), ledger=ledger, tag=Tag.PARAMETERS, page_lock=lock)
    assert list(lock.locked.values()) == regions_for(sizes) == [5 * PAGE, 7 * PAGE, 9 * PAGE]
    assert arena.pinned
    arena.close()


class Gated(RecordingLock):
    """Locks what ``gate`` lets through."""

    def __init__(self, allow: int = 1 << 30) -> None:
        super().__init__(allow)
        self.gate, self.asked = threading.Semaphore(0), threading.Event()

    def lock(self, address: int, size: int) -> None:
        self.asked.set()
        assert self.gate.acquire(timeout=300)
        super().lock(address, size)


def behind(lock: RecordingLock, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> HostArena:
    """Three regions that are locked behind."""
    monkeypatch.setattr("stormtorch.memory.host.arena._REGION_LIMIT", 8 * PAGE)
    return HostArena(24 * PAGE, ledger=ledger, tag=Tag.OPTIMIZER, page_lock=lock, lock_behind=True)


@pytest.mark.parametrize("native", [True, False])
def test_what_is_locked_behind_is_touched_there_if_nobody_is_in_danger(
    native: bool, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[tuple[str, bool]] = []

    def touch(_address: int, _size: int) -> None:
        touched.append((threading.current_thread().name.partition("_")[0], bool(lock.locked)))

    monkeypatch.setattr("stormtorch.memory.host.pinned.can_touch_beside_writers", lambda: native)
    for module in ("pinned", "arena"):
        monkeypatch.setattr(f"stormtorch.memory.host.{module}.first_touch", touch)
    lock = RecordingLock()
    arena = behind(lock, ledger, monkeypatch)
    arena.settle()
    assert arena.pinned
    assert [thread for thread, _ in touched] == (["storm-page-lock"] * 3 if native else ["MainThread"] * 3)
    assert not touched[0][1], "locked before it was touched"
    arena.close()


def test_memory_can_be_used_while_it_is_locked_behind(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = Gated()
    arena = behind(lock, ledger, monkeypatch)
    tensors = [arena.tensor((8 * PAGE,), torch.uint8).fill_(number + 1) for number in range(3)]
    assert not arena.settled
    assert not arena.pinned
    assert ledger.pinned_bytes == 0
    lock.gate.release(3)
    arena.settle()
    assert arena.settled
    assert arena.pinned
    assert sorted(lock.locked) == sorted(tensor.data_ptr() for tensor in tensors)
    assert ledger.pinned_bytes == 24 * PAGE
    assert [tensor.unique().tolist() for tensor in tensors] == [[1], [2], [3]]
    arena.close()
    assert lock.locked == {}


def test_a_lock_refused_behind_is_undone_and_said(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock = Gated(allow=2)
    arena = behind(lock, ledger, monkeypatch)
    tensor = arena.tensor((8,), torch.float32).fill_(7)
    lock.gate.release(3)
    arena.settle()
    assert arena.settled
    assert not arena.pinned
    assert lock.locked == {}
    assert ledger.pinned_bytes == 0
    assert not caplog.messages, "a thread has no user to tell"
    arena.say_if_refused()
    assert "Optimizer states remain on the CPU" in caplog.messages[0]
    assert float(tensor.sum()) == 56
    arena.close()


def test_after_a_refusal_behind_nothing_more_is_locked(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be undone, and be missing meanwhile where others need it."""
    asked = []

    class Second(RecordingLock):
        def lock(self, address: int, size: int) -> None:
            asked.append(address)
            if len(asked) == 2:
                raise StormError("CUDA_ERROR_OUT_OF_MEMORY")
            super().lock(address, size)

    lock = Second()
    arena = behind(lock, ledger, monkeypatch)
    arena.settle()
    assert len(asked) == 2
    assert lock.locked == {}
    arena.close()


def test_who_is_refused_while_others_lock_behind_asks_again(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they have locked so far may be given back."""
    lock = Gated(allow=2)
    arena = behind(lock, ledger, monkeypatch)
    lock.gate.release(2)
    while len(lock.locked) < 2:
        time.sleep(0.001)
    threading.Timer(0.2, lock.gate.release, [3]).start()  # its third is refused; then ours, twice
    lock.gate.release(1)
    ours = HostArena(PAGE, ledger=ledger, tag=Tag.GRADIENTS, page_lock=lock)
    assert ours.pinned
    assert arena.settled
    assert not arena.pinned
    ours.close()
    arena.close()


@pytest.mark.parametrize("close", [False, True], ids=["dropped", "closed"])
@pytest.mark.parametrize("lock_behind", [False, True], ids=["at once", "behind"])
@pytest.mark.filterwarnings("ignore:Host page-lock refused")
def test_an_arena_that_was_refused_goes_like_any_other(lock_behind: bool, close: bool) -> None:
    """The refusal is kept, to be told; not what it happened to."""
    ledger, lock = roomy(), RecordingLock(allow=1)
    arena = HostArena([PAGE] * 3, ledger=ledger, tag=Tag.OPTIMIZER, page_lock=lock, lock_behind=lock_behind)
    arena.settle()
    memory = [weakref.ref(region.bytes) for region in arena._regions]
    if close:
        arena.close()
    del arena
    deadline_s = time.monotonic() + 300
    while any(reference() is not None for reference in memory) or ledger.used_bytes(Tier.HOST):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_memory_is_there_until_it_is_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread undoes what was locked before a refusal; no other object holds that memory any more."""
    ledger, unlocking, go_on, mapped = roomy(), threading.Event(), threading.Event(), []

    class Slow(RecordingLock):
        def unlock(self, address: int) -> None:
            unlocking.set()
            assert go_on.wait(300)
            mapped.append(is_mapped(address))
            super().unlock(address)

    lock = Slow(allow=2)
    arena = behind(lock, ledger, monkeypatch)
    assert unlocking.wait(300)
    outcome = arena._hold.outcome
    assert outcome is not None
    del arena
    gc.collect()
    go_on.set()
    assert outcome.result(timeout=300) is False
    assert mapped == [True, True]


def is_mapped(address: int) -> bool:
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(end, 16) for first, end in spans)


def test_ctrl_c_while_close_waits_for_a_lock_leaves_nothing_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, lock = roomy(), Gated()
    arena = behind(lock, ledger, monkeypatch)
    kept = arena.tensor((8,), torch.uint8)  # as an optimizer's state would be
    outcome = arena._hold.outcome
    assert outcome is not None
    assert lock.asked.wait(300)
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        arena.close()
    lock.gate.release(3)
    assert outcome.result(timeout=300) is False
    assert lock.locked == {}
    assert ledger.used_bytes(Tier.HOST) == 0
    del kept


def test_a_device_that_fails_while_locks_are_undone_is_not_pinned(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """STORM tells it once, and training goes on."""

    class Broken(RecordingLock):
        def unlock(self, address: int) -> None:
            super().unlock(address)
            raise StormError("CUDA_ERROR_LAUNCH_FAILED")

    class Mistaken(RecordingLock):
        def lock(self, _address: int, _size: int) -> None:
            raise RuntimeError("not a refusal")

    for lock in (Broken(allow=2), Mistaken()):
        arena = behind(lock, ledger, monkeypatch)
        while not arena.settled:
            time.sleep(0.001)
        assert not arena.pinned
        assert not arena.pinned
        arena._hold.locked.clear()
        arena.close()


def test_an_arena_can_be_closed_while_it_is_locked_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The region that is being locked is unlocked when it is; the others are left alone."""
    ledger, lock = roomy(), Gated()
    arena = behind(lock, ledger, monkeypatch)
    lock.gate.release(1)
    while not lock.locked:
        pass
    threading.Timer(0.2, lock.gate.release, [2]).start()
    arena.close()
    assert lock.locked == {}
    assert ledger.used_bytes(Tier.HOST) == 0
    arena.settle()
    assert not arena.pinned
    assert lock.locked == {}


def test_an_arena_that_is_dropped_while_it_is_locked_behind_goes_when_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, lock = roomy(), Gated()
    arena = behind(lock, ledger, monkeypatch)
    outcome = arena._hold.outcome
    assert outcome is not None
    del arena
    lock.gate.release(3)
    outcome.result(timeout=30)
    del outcome
    deadline_s = time.monotonic() + 300
    while lock.locked or ledger.used_bytes(Tier.HOST):
        gc.collect()
        assert time.monotonic() < deadline_s


def test_an_interrupt_while_memory_is_mapped_ends_what_was_to_be_locked_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger, lock = roomy(), Gated()

    def mapped(index: int, size: int, *, fork: bool) -> Region:
        if index == 2:
            threading.Timer(0.1, lock.gate.release, [3]).start()
            raise KeyboardInterrupt
        return map_private(index, size, fork=fork)

    monkeypatch.setattr("stormtorch.memory.host.arena.map_private", mapped)
    with pytest.raises(KeyboardInterrupt):
        behind(lock, ledger, monkeypatch)
    assert lock.locked == {}
    assert ledger.used_bytes(Tier.HOST) == 0


def test_large_arenas_are_locked_in_regions_that_no_block_crosses(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stormtorch.memory.host.arena._REGION_LIMIT", 8 * PAGE)
    lock = RecordingLock()
    arena = HostArena(20 * PAGE, ledger=ledger, tag=Tag.PARAMETERS, page_lock=lock)
    assert sorted(lock.locked.values()) == [4 * PAGE, 8 * PAGE, 8 * PAGE]
    starts = dict(lock.locked)
    for _ in range(4):
        data = arena.tensor((5 * PAGE if _ < 2 else 3 * PAGE,), torch.uint8)
        assert any(a <= data.data_ptr() and data.data_ptr() + data.numel() <= a + s for a, s in starts.items())
    with pytest.raises(OutOfBudget):
        arena.allocate(8 * PAGE)
    arena.close()
    # When a later region is refused, the earlier ones are unlocked again: all or nothing.
    partial = RecordingLock(allow=2)
    arena = HostArena(20 * PAGE, ledger=ledger, tag=Tag.PARAMETERS, page_lock=partial)
    assert partial.locked == {}
    assert not arena.pinned
    assert len(caplog.messages) == 1
    arena.close()


def _double(shared: SharedArena, place: Place, pipe: Connection) -> None:
    arena = HostArena.attach(shared)
    tensor = arena.at(place, torch.float32, (4, 4))
    tensor *= 2
    pipe.send(float(tensor.sum()))
    try:
        arena.allocate(1)
    except OutOfBudget:
        pipe.send("refused")
    arena.close()


def test_an_arena_is_shared_with_another_process(ledger: Ledger) -> None:
    arena = HostArena(MiB, ledger=ledger, tag=Tag.PARAMETERS, shared=True)
    arena.allocate(100)
    place = arena.allocate(64)
    tensor = arena.at(place, torch.float32, (4, 4))
    tensor.fill_(1.5)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_double, args=(arena.share(), place, there))
    process.start()
    assert here.poll(300)
    assert here.recv() == 48.0
    assert here.poll(300)
    assert here.recv() == "refused"
    process.join()
    assert process.exitcode == 0
    assert bool((tensor == 3).all())
    name = arena.share()
    arena.close()
    with pytest.raises(SettingError, match="It must run"):
        HostArena.attach(name)


def test_an_interrupt_while_pages_are_locked_leaves_nothing_locked_or_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stormtorch.memory.host.arena._REGION_LIMIT", 8 * PAGE)
    ledger = roomy()

    class Interrupted(RecordingLock):
        def lock(self, address: int, size: int) -> None:
            super().lock(address, size)
            if len(self.locked) == 2:
                raise KeyboardInterrupt  # as Python delivers it: when the driver's call returns

    lock = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        HostArena(24 * PAGE, ledger=ledger, tag=Tag.PARAMETERS, page_lock=lock)
    assert lock.locked == {}
    assert ledger.used_bytes(Tier.HOST) == 0


def test_ctrl_c_while_another_thread_locks_waits_for_it() -> None:
    """What is being locked can be unlocked only when it is: else it would stay so for good, without its memory."""
    ledger, pressed = roomy(), threading.Event()

    class Slow(RecordingLock):
        def lock(self, address: int, size: int) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            pressed.wait(0.3)  # for nothing: time enough to be unlocked too soon
            super().lock(address, size)

    lock = Slow()
    with pytest.raises(KeyboardInterrupt):
        HostArena(8 * PAGE, ledger=ledger, tag=Tag.PARAMETERS, page_lock=lock)
    assert lock.locked == {}
    assert ledger.used_bytes(Tier.HOST) == 0


def test_a_driver_that_cannot_unlock_does_not_keep_the_charge_or_the_descriptors() -> None:
    class Stuck(RecordingLock):
        def unlock(self, address: int) -> None:
            raise StormError(f"CUDA_ERROR_LAUNCH_FAILED at {address}")

    ledger, before = roomy(), open_descriptors()
    arena = HostArena(MiB, ledger=ledger, tag=Tag.PARAMETERS, page_lock=Stuck(), shared=True)
    with pytest.raises(StormError, match="LAUNCH_FAILED"):
        arena.close()
    arena.close()
    assert ledger.used_bytes(Tier.HOST) == 0
    assert open_descriptors() == before


def test_a_failed_shared_arena_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, before = roomy(), open_descriptors()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stormtorch.memory.host.arena.first_touch", fail)
    with pytest.raises(KeyboardInterrupt):
        HostArena(MiB, ledger=ledger, tag=Tag.PARAMETERS, shared=True)
    assert open_descriptors() == before
    assert ledger.used_bytes(Tier.HOST) == 0


def test_a_forked_child_does_not_unlock_what_its_parent_locked(ledger: Ledger) -> None:
    lock = RecordingLock()
    arena = HostArena(MiB, ledger=ledger, tag=Tag.PARAMETERS, page_lock=lock)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of a fork beside torch's threads
        child = os.fork()
    if child == 0:
        arena.close()
        os._exit(0 if len(lock.locked) == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    arena.close()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.gpu
def test_real_page_lock_and_a_failed_one_leaves_no_error_behind(ledger: Ledger) -> None:
    device = torch.device("cuda", 0)
    arena = HostArena(64 * MiB, ledger=ledger, tag=Tag.PARAMETERS, page_lock=page_lock_for(device))
    tensor = arena.tensor((MiB,), torch.float32)
    assert arena.pinned
    assert tensor.is_pinned()
    lock = page_lock_for(device)
    assert lock is not None
    with pytest.raises(StormError, match="CUDA_ERROR"):
        lock.lock(tensor.data_ptr(), 4096)  # already registered
    with pytest.raises(StormError, match="CUDA_ERROR"):
        lock.lock(4096, 4096)  # not mapped
    there = tensor.fill_(3).to(device, non_blocking=True)
    assert float((there + 1).sum()) == 4 * MiB  # a kept error would surface at this launch
    torch.cuda.synchronize()
    arena.close()
    assert not tensor.is_pinned()
