from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stormtorch.core.errors import LaneError, SettingError
from stormtorch.core.events import Span, What
from stormtorch.core.sizes import MiB
from stormtorch.core.tags import Tag
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.cuda.clock import CudaClock
from stormtorch.memory.host.arena import HostArena
from stormtorch.memory.host.pinning import page_lock_for
from stormtorch.memory.lanes.build import Lanes, open_lanes
from stormtorch.memory.lanes.cuda import need_driver
from stormtorch.memory.lanes.flags import Flags
from stormtorch.memory.lanes.lane import Delay
from stormtorch.memory.lanes.waits import WaitMeter

from ..forkserver import run

OpenLanes = Callable[..., Lanes]


@pytest.fixture(params=["cpu", *(pytest.param(kind, marks=pytest.mark.gpu) for kind in ("cuda", "staged"))])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lane_device(kind: str) -> torch.device:
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", 0)


@pytest.fixture
def opened(kind: str, lane_device: torch.device, ledger: Ledger) -> Iterator[OpenLanes]:
    """Opens lanes of the kind under test and closes them; a small staging ring makes every copy take several pieces."""
    pageable = HostArena(4096, ledger=ledger, tag=Tag.DATA) if kind == "staged" else None
    lanes: list[Lanes] = []

    def opener(**settings: object) -> Lanes:
        lanes.append(open_lanes(lane_device, home=pageable, ledger=ledger, ring_bytes=MiB // 4, **settings))  # type: ignore[arg-type]
        return lanes[-1]

    yield opener
    for each in lanes:
        each.close()
        each.close()
    if pageable is not None:
        pageable.close()


def at_home(kind: str, tensor: torch.Tensor) -> torch.Tensor:
    """A host tensor as this kind of lane may copy it; staged lanes exist for those that are not page-locked."""
    return tensor.pin_memory() if kind == "cuda" else tensor


def random_delay(kind: str, seed: int) -> Delay:
    chance = random.Random(seed)
    if kind == "cpu":
        return lambda: time.sleep(chance.random() * 2e-3)
    return lambda: torch.cuda._sleep(int(chance.random() * 2e6))


def slow(kind: str) -> Delay:
    """About 5 ms before each piece of work."""
    return (lambda: time.sleep(5e-3)) if kind == "cpu" else (lambda: torch.cuda._sleep(10_000_000))


def test_there_and_back(opened: OpenLanes, lane_device: torch.device, kind: str) -> None:
    lanes = opened()
    home, back = (at_home(kind, torch.randn(300_001)) for _ in range(2))
    there = torch.empty(300_001, device=lane_device)
    lanes.load.copy(there, home, Tag.PARAMETERS)
    lanes.store.wait(lanes.load.record())
    lanes.store.copy(back, there, Tag.PARAMETERS)
    lanes.store.record().synchronize()
    assert torch.equal(home, back)


class _Listening(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heard: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


def test_who_listens_to_operations_hears_nothing(opened: OpenLanes, lane_device: torch.device, kind: str) -> None:
    """Weights come in the middle of a block that is recomputed, and whose operations are compared."""
    lanes = opened()
    home, there = at_home(kind, torch.randn(300_001)), torch.empty(300_001, device=lane_device)
    with _Listening() as listening:
        lanes.load.wait(lanes.compute.record())
        lanes.load.copy(there, home, Tag.PARAMETERS)
        lanes.store.wait(lanes.load.record())
        lanes.store.copy(home, there, Tag.PARAMETERS)
        lanes.store.record().synchronize()
    assert not listening.heard


def test_a_chain_of_lanes_with_random_delays_gives_the_same_numbers(
    opened: OpenLanes, lane_device: torch.device, kind: str
) -> None:
    """load → compute → store, two buffers reused twenty times: any missing wait is a wrong number."""
    lanes = opened(delay=random_delay(kind, 3))
    homes = [at_home(kind, torch.full((50_000,), float(i))) for i in range(20)]
    results = [at_home(kind, torch.empty(50_000)) for _ in homes]
    buffers = [torch.empty(50_000, device=lane_device) for _ in range(2)]
    stored = [lanes.compute.record(), lanes.compute.record()]
    for i, (home, result) in enumerate(zip(homes, results, strict=True)):
        buffer = buffers[i % 2]
        lanes.load.wait(stored[i % 2])
        lanes.load.copy(buffer, home, Tag.DATA)
        lanes.compute.wait(lanes.load.record())
        buffer.mul_(3).add_(1)
        lanes.store.wait(lanes.compute.record())
        lanes.store.copy(result, buffer, Tag.DATA)
        stored[i % 2] = lanes.store.record()
    lanes.synchronize()
    for i, result in enumerate(results):
        assert bool((result == 3 * i + 1).all()), f"buffer {i} was overwritten or read too early"


def test_the_delay_would_expose_a_missing_wait(opened: OpenLanes, lane_device: torch.device, kind: str) -> None:
    """The test above can fail: without the wait, compute really runs before the copy."""
    sleep: Delay = (lambda: time.sleep(0.2)) if kind == "cpu" else (lambda: torch.cuda._sleep(400_000_000))
    lanes = opened(delay=sleep)
    there = torch.zeros(1000, device=lane_device)
    home = at_home(kind, torch.ones(1000))
    lanes.compute.synchronize()
    lanes.load.copy(there, home, Tag.DATA)
    early = there.clone()
    lanes.synchronize()
    assert float(early.sum()) == 0
    assert float(there.sum()) == 1000


def test_copies_return_before_they_are_done(opened: OpenLanes, lane_device: torch.device, kind: str) -> None:
    go = threading.Event()
    sleep: Delay = go.wait if kind == "cpu" else (lambda: torch.cuda._sleep(200_000_000))  # type: ignore[assignment]
    lanes = opened(delay=sleep)
    home = at_home(kind, torch.ones(1000))
    there = torch.zeros(1000, device=lane_device)
    lanes.load.copy(there, home, Tag.DATA)
    event = lanes.load.record()
    assert not event.done()
    go.set()
    event.synchronize()
    assert event.done()


def test_flags_pass_between_lanes_and_host(
    opened: OpenLanes, lane_device: torch.device, ledger: Ledger, kind: str
) -> None:
    lanes = opened(delay=random_delay(kind, 1))
    flags = Flags(4, ledger=ledger, device=lane_device, page_lock=page_lock_for(lane_device))
    there = torch.zeros(1000, device=lane_device)
    home, back = (at_home(kind, torch.full((1000,), value)) for value in (5.0, 0.0))
    lanes.load.wait_flag(flags[0], 7)  # the host gates the load ...
    lanes.load.copy(there, home, Tag.DATA)
    lanes.store.wait(lanes.load.record())
    lanes.store.copy(back, there, Tag.DATA)
    lanes.store.write_flag(flags[1], 3)  # ... and learns of the store
    assert not flags[1].wait(3, timeout_s=0.05)
    home.fill_(6.0)
    flags[0].set(7)
    assert flags[1].wait(3, timeout_s=30)
    assert bool((back == 6).all())
    lanes.synchronize()
    flags.close()


def test_records_say_what_was_copied(opened: OpenLanes, lane_device: torch.device, kind: str) -> None:
    records: list[Span] = []
    lanes = opened(sink=records.append)
    there, home = torch.empty(1000, device=lane_device), at_home(kind, torch.ones(1000))
    for _ in range(3):
        lanes.load.copy(there, home, Tag.OPTIMIZER)
    lanes.synchronize()
    assert [(r.name, r.tag, r.bytes) for r in records if r.what is What.COPY] == [("load", Tag.OPTIMIZER, 4000)] * 3
    assert all(r.what is What.COPY and r.seconds >= 0 and r.start_s >= 0 for r in records)


def test_copies_and_waits_of_all_lanes_are_on_the_clock_of_the_host(
    opened: OpenLanes, lane_device: torch.device, kind: str
) -> None:
    spans: list[Span] = []
    lanes = opened(sink=spans.append, delay=slow(kind))
    waits, near_s = WaitMeter(lanes.compute, spans.append), 0.0 if kind == "cpu" else 2e-3
    there, home = torch.empty(MiB, device=lane_device), at_home(kind, torch.ones(MiB))
    lanes.synchronize()
    for turn in range(30):
        spans.clear()
        before_s = time.perf_counter()
        lanes.load.copy(there, home, Tag.PARAMETERS, turn)
        waits.wait(lanes.load.record(), "weights", turn)
        lanes.synchronize()
        between_s = time.perf_counter()
        lanes.store.copy(home, there, Tag.GRADIENTS, turn)
        lanes.synchronize()
        after_s = time.perf_counter()
        waits.emit()
        found = {span.name: span for span in spans}
        assert all(span.unit == turn for span in spans)
        whole = {"load": (before_s, between_s), "store": (between_s, after_s), "weights": (before_s, between_s)}
        for span in spans:
            assert whole[span.name][0] - near_s <= span.start_s < span.end_s <= whole[span.name][1] + near_s
        assert found["load"].what is found["store"].what is What.COPY
        if turn > 1 and "weights" in found:  # else the host was busy elsewhere, and the load over before the wait
            assert found["weights"].what is What.WAIT
            assert found["load"].end_s <= found["weights"].end_s + near_s
            return
    pytest.fail("compute never had to wait")


@pytest.mark.gpu
def test_the_clock_of_a_gpu_stays_right_while_its_anchor_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = CudaClock(need_driver(), 0)
    monkeypatch.setattr("stormtorch.memory.cuda.clock._MOVES_S", 0.0)
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        before_s, anchor = time.perf_counter(), clock._anchor
        start.record()
        torch.cuda._sleep(10_000_000)
        end.record()
        torch.cuda.synchronize()
        after_s = time.perf_counter()
        start_s, end_s = clock.span(start, end)
        assert before_s - 2e-3 <= start_s < end_s <= after_s + 2e-3
        assert clock._anchor is not anchor
        assert clock.span(start, end) == pytest.approx((start_s, end_s), abs=1e-5)


def test_wrong_copies_are_refused_when_they_are_asked_for(opened: OpenLanes) -> None:
    lanes = opened()
    with pytest.raises(SettingError, match="cast"):
        lanes.load.copy(torch.empty(2), torch.empty(2, dtype=torch.float64), Tag.DATA)
    with pytest.raises(SettingError, match="elements"):
        lanes.load.copy(torch.empty(3), torch.empty(2), Tag.DATA)
    with pytest.raises(SettingError, match="contiguous"):
        lanes.load.copy(torch.empty(2), torch.empty(4)[::2], Tag.DATA)


def test_shapes_may_differ_and_modes_do_not_matter(opened: OpenLanes, lane_device: torch.device, kind: str) -> None:
    with torch.inference_mode():
        there = torch.zeros(2, 3, device=lane_device)
        home = at_home(kind, torch.ones(6))
    lanes = opened()
    lanes.load.wait(lanes.compute.record())  # which made the zeros
    lanes.load.copy(there, home, Tag.DATA)
    lanes.store.wait(lanes.load.record())
    lanes.store.fill(there[0], 0)
    lanes.synchronize()
    assert there.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_host_memory_is_filled_behind_what_the_lane_waits_for(
    opened: OpenLanes, lane_device: torch.device, kind: str, ledger: Ledger
) -> None:
    lanes = opened()
    flags = Flags(1, ledger=ledger, device=lane_device, page_lock=page_lock_for(lane_device))
    home, there = at_home(kind, torch.ones(MiB)), torch.zeros(MiB, device=lane_device)
    lanes.load.wait(lanes.compute.record())
    lanes.load.wait_flag(flags[0], 1)
    lanes.load.copy(there, home, Tag.DATA)
    lanes.store.wait(lanes.load.record())
    lanes.store.fill(home, 0xFF)
    flags[0].set(1)
    lanes.synchronize()
    assert there.eq(1).all()
    assert home.isnan().all()
    flags.close()


def test_a_failed_writer_frees_the_lane_that_waits_for_its_flag(ledger: Ledger) -> None:
    lanes = open_lanes(torch.device("cpu"))
    flags = Flags(1, ledger=ledger, device=lanes.device)
    lanes.load.wait_flag(flags[0], 1)

    def fail() -> None:
        raise RuntimeError("the link is down")

    lanes.store.enqueue(fail)  # type: ignore[attr-defined]
    with pytest.raises(LaneError, match="the link is down"):
        lanes.store.synchronize()
    with pytest.raises(LaneError, match="the link is down"):
        lanes.store.write_flag(flags[0], 1)
    lanes.close()  # would hang if the load lane still waited
    flags.close()


def test_a_failing_delay_surfaces_and_nothing_hangs(ledger: Ledger) -> None:
    device = torch.device("cpu")
    flags = Flags(1, ledger=ledger, device=device)
    broken = threading.Event()

    def fail_once_told() -> None:
        if broken.is_set():
            raise RuntimeError("the link is down")

    lanes = open_lanes(device, delay=fail_once_told)
    lanes.load.copy(torch.empty(10), torch.ones(10), Tag.DATA)
    lanes.load.synchronize()
    holding, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        holding.set()
        go_on.wait()

    lanes.load.enqueue(hold)  # type: ignore[attr-defined]  # the queue stands still until everything is in it
    assert holding.wait(300)
    broken.set()
    lanes.load.copy(torch.empty(10), torch.ones(10), Tag.DATA)
    event = lanes.load.record()
    lanes.load.write_flag(flags[0], 1)
    go_on.set()
    with pytest.raises(LaneError, match="the link is down") as caught:
        event.synchronize()
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(LaneError, match="ended early"):
        flags[0].wait(
            1, timeout_s=30
        )  # what should have been written never will be: the wait raises instead of hanging
    with pytest.raises(LaneError, match="the link is down"):
        lanes.load.copy(torch.empty(10), torch.ones(10), Tag.DATA)
    lanes.close()
    flags.close()


def test_a_lane_that_waits_for_a_failed_lane_fails_too() -> None:
    lanes = open_lanes(torch.device("cpu"))
    go_on = threading.Event()

    def fail() -> None:
        go_on.wait()
        raise RuntimeError("first")

    lanes.load.enqueue(fail)  # type: ignore[attr-defined]
    lanes.store.wait(lanes.load.record())
    go_on.set()
    with pytest.raises(LaneError, match="first"):
        lanes.store.synchronize()
    lanes.close()


def test_threads_end_with_their_lanes(opened: OpenLanes, kind: str) -> None:
    if kind == "cuda":
        pytest.skip("CUDA lanes have no thread")
    before = threading.active_count()
    lanes = opened()
    assert threading.active_count() == before + (2 if lanes.aside is lanes.load else 3)
    lanes.close()
    assert threading.active_count() == before
    with pytest.raises(LaneError, match="closed"):
        lanes.load.record()


def test_lanes_that_are_dropped_end_their_threads() -> None:
    before = threading.active_count()
    lanes = open_lanes(torch.device("cpu"))
    lanes.load.copy(torch.empty(10), torch.ones(10), Tag.DATA)
    del lanes
    gc.collect()
    deadline = time.monotonic() + 300
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_lane_lets_go_of_its_tensors() -> None:
    lanes = open_lanes(torch.device("cpu"))
    released = threading.Event()

    class Watched(torch.Tensor):
        def __del__(self) -> None:
            released.set()

    source = torch.ones(10).as_subclass(Watched)
    lanes.load.copy(torch.empty(10), source, Tag.DATA)
    lanes.load.synchronize()
    del source
    gc.collect()
    assert released.wait(300), "the lane's thread still holds the last copy's tensors while it idles"
    lanes.close()


def test_a_script_that_forgets_to_close_its_lanes_still_ends_well() -> None:
    code = (
        "import torch\n"
        "from stormtorch.core.tags import Tag\n"
        "from stormtorch.memory.lanes.build import open_lanes\n"
        "lanes = open_lanes(torch.device('cpu'))\n"
        "big, other = torch.ones(1 << 26), torch.ones(1 << 26)\n"
        "for _ in range(50): lanes.load.copy(big, other, Tag.DATA)\n"
    )
    done = run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_is_told_to_open_its_own_lanes() -> None:
    lanes, go_on = open_lanes(torch.device("cpu")), threading.Event()
    reached = lanes.load.record()
    reached.synchronize()
    lanes.load.enqueue(go_on.wait)  # type: ignore[attr-defined]
    queued = lanes.load.record()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of a fork beside other threads
        child = os.fork()
    if child == 0:
        signal.alarm(10)  # a wait for what the parent had queued would have no end
        for forbidden in (lanes.load.record, queued.synchronize):
            try:
                forbidden()
            except LaneError:
                continue
            os._exit(1)
        reached.synchronize()
        os._exit(0)
    go_on.set()
    assert os.waitpid(child, 0)[1] == 0
    lanes.close()


@pytest.mark.gpu
def test_an_arena_that_could_not_be_locked_is_served_through_a_ring(ledger: Ledger) -> None:
    device = torch.device("cuda", 0)
    home = HostArena(MiB, ledger=ledger, tag=Tag.DATA)
    lanes = open_lanes(device, home=home, ledger=ledger)
    assert lanes.ring is not None
    assert lanes.ring.pinned
    data, there = home.tensor((MiB,), torch.uint8).fill_(7), torch.zeros(MiB, dtype=torch.uint8, device=device)
    lanes.load.wait(lanes.compute.record())  # which made the zeros
    lanes.load.copy(there, data, Tag.DATA)
    lanes.synchronize()
    assert bool((there == 7).all())
    lanes.close()
    with pytest.raises(SettingError, match="ledger="):
        open_lanes(device, home=home)
    home.close()


@pytest.mark.gpu
def test_a_cuda_lane_refuses_pageable_memory() -> None:
    """Such a copy would block the host, and behind a flag that the host must set it would do so for ever."""
    device = torch.device("cuda", 0)
    lanes = open_lanes(device)
    with pytest.raises(SettingError, match="page-locked memory only"):
        lanes.load.copy(torch.empty(10, device=device), torch.ones(10), Tag.DATA)
    lanes.close()


@pytest.mark.gpu
def test_the_host_enqueues_without_waiting_and_both_directions_overlap(ledger: Ledger) -> None:
    device = torch.device("cuda", 0)
    size = 256 * MiB
    arena = HostArena(2 * size, ledger=ledger, tag=Tag.DATA, page_lock=page_lock_for(device))
    up, down = (arena.tensor((size,), torch.uint8) for _ in range(2))
    lanes = open_lanes(device)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    here = torch.zeros(size, dtype=torch.uint8, device=device)

    def timed(both: bool) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            lanes.load.copy(there, up, Tag.DATA)
            if both:
                lanes.store.copy(down, here, Tag.DATA)
        enqueued = time.perf_counter() - start
        lanes.synchronize()
        elapsed = time.perf_counter() - start
        assert enqueued < 0.25 * elapsed, "the host waited for copies"
        return elapsed

    timed(True)
    for _ in range(10):  # others may be using the link just now
        alone, together = min(timed(False) for _ in range(3)), min(timed(True) for _ in range(3))
        if together < 1.5 * alone:
            break
    assert together < 1.5 * alone, "loads and stores take turns"
    lanes.close()
    arena.close()
