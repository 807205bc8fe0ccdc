from __future__ import annotations

import contextlib
import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stormtorch.core.budget import Budget
from stormtorch.core.errors import LaneError, OutOfBudget
from stormtorch.core.sizes import MiB
from stormtorch.core.tags import Tag, Tier
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.lanes.build import open_lanes
from stormtorch.memory.lanes.lane import Delay
from stormtorch.memory.pools.device import DeviceBlock, Slot, SlotRing

CPU = torch.device("cpu")


def jitter(device: torch.device) -> Delay:
    chance = random.Random(5)
    if device.type == "cpu":
        return lambda: time.sleep(chance.random() * 1e-3)
    return lambda: torch.cuda._sleep(int(chance.random() * 1e6))


def test_data_larger_than_the_ring_streams_through_it_with_delays_and_poison(
    device: torch.device, ledger: Ledger
) -> None:
    lanes = open_lanes(device, delay=jitter(device))
    ring = SlotRing(
        device, count=3, slot_bytes=4000, ledger=ledger, tag=Tag.PARAMETERS, compute=lanes.compute, poison=lanes.store
    )
    gpu = device.type == "cuda"
    homes = [torch.full((1000,), float(i), pin_memory=gpu) for i in range(40)]
    results = [torch.zeros(1000, pin_memory=gpu) for _ in homes]
    for home, result in zip(homes, results, strict=True):
        slot = ring.acquire(lanes.load)
        assert slot is not None
        data = slot.tensor(torch.float32, (1000,))
        lanes.load.copy(data, home, Tag.PARAMETERS)
        lanes.compute.wait(lanes.load.record())
        data.add_(0.5)
        lanes.store.wait(lanes.compute.record())
        lanes.store.copy(result, data, Tag.PARAMETERS)
        slot.release(lanes.store.record())
        ring.check()
    lanes.synchronize()
    assert [float(r.mean()) for r in results] == [i + 0.5 for i in range(40)]
    assert all(bool((r == r[0]).all()) for r in results)
    assert all(bool(torch.isnan(s.tensor(torch.bfloat16, (2000,))).all()) for s in ring.slots), (
        "released slots hold poison"
    )
    assert ledger.used_bytes(Tier.DEVICE) == 3 * 4096
    ring.close()
    ring.close()
    lanes.close()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), max_size=60))
def test_random_acquire_and_release_conserve_the_slots(steps: list[bool]) -> None:
    ledger = Ledger(Budget(tier=Tier.DEVICE, limit_bytes=MiB, given="vram='1MiB'"))
    lanes = open_lanes(CPU)
    ring = SlotRing(CPU, count=4, slot_bytes=512, ledger=ledger, tag=Tag.GRADIENTS, compute=lanes.compute)
    held: list[Slot] = []
    for take in steps:
        if take:
            slot = ring.acquire(lanes.load)
            assert (slot is None) == (len(held) == 4)
            if slot is not None:
                held.append(slot)
        elif held:
            held.pop(len(held) // 2).release(lanes.compute.record())
        ring.check()
        assert ring.free_count == 4 - len(held)
        addresses = {slot.bytes.data_ptr() for slot in held}
        assert len(addresses) == len(held)
    ring.close()
    lanes.close()
    assert ledger.used_bytes(Tier.DEVICE) == 0


def test_the_host_may_run_ahead_but_the_bytes_do_not_grow(device: torch.device, ledger: Ledger) -> None:
    slow: Delay = (lambda: time.sleep(2e-3)) if device.type == "cpu" else (lambda: torch.cuda._sleep(4_000_000))
    lanes = open_lanes(device, delay=slow)
    ring = SlotRing(device, count=2, slot_bytes=MiB, ledger=ledger, tag=Tag.PARAMETERS, compute=lanes.compute)
    home = torch.ones(MiB, dtype=torch.uint8)
    home = home if device.type == "cpu" else home.pin_memory()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start_bytes = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    for _ in range(50):
        slot = ring.acquire(lanes.load)
        assert slot is not None, "the host is never refused for running ahead"
        lanes.load.copy(slot.bytes, home, Tag.PARAMETERS)
        slot.release(lanes.load.record())
    assert not lanes.load.record().done(), "the host was not ahead: this test tested nothing"
    assert ledger.peak_bytes(Tier.DEVICE) == 2 * MiB
    if device.type == "cuda":
        assert torch.cuda.max_memory_allocated() == start_bytes
    lanes.synchronize()
    ring.close()
    lanes.close()


def test_a_failed_lane_costs_no_slot_and_no_memory(ledger: Ledger) -> None:
    lanes = open_lanes(CPU)
    ring = SlotRing(CPU, count=2, slot_bytes=512, ledger=ledger, tag=Tag.GRADIENTS, compute=lanes.compute)

    def fail() -> None:
        raise RuntimeError("the link is down")

    lanes.load.enqueue(fail)  # type: ignore[attr-defined]
    with pytest.raises(LaneError, match="the link is down"):
        lanes.load.synchronize()
    with pytest.raises(LaneError, match="the link is down"):
        ring.acquire(lanes.load)
    assert ring.free_count == 2
    assert ring.acquire(lanes.store) is not None
    ring.check()
    with contextlib.suppress(LaneError):
        ring.close()
    assert ledger.used_bytes(Tier.DEVICE) == 0
    lanes.close()


def test_a_ring_beyond_the_budget_is_refused_before_it_is_allocated() -> None:
    ledger = Ledger(Budget(tier=Tier.DEVICE, limit_bytes=MiB, given="vram='1MiB'"))
    with pytest.raises(OutOfBudget, match=r"1\.5 MiB on the device for PARAMETERS .*vram='1MiB'"):
        DeviceBlock(CPU, 3 * MiB // 2, ledger=ledger, tag=Tag.PARAMETERS)
    assert ledger.used_bytes(Tier.DEVICE) == 0


def test_views_of_a_block(device: torch.device, ledger: Ledger) -> None:
    block = DeviceBlock(device, 1024, ledger=ledger, tag=Tag.OPTIMIZER)
    block.tensor().zero_()
    block.tensor(torch.float32, (2, 3), offset=512).fill_(1)
    assert float(block.tensor(torch.float32).sum()) == 6
    assert float(block.tensor(torch.float32, offset=512)[:6].sum()) == 6
    block.close()
    block.close()
    with pytest.raises(AssertionError, match="closed"):
        block.tensor()


def test_a_full_device_is_reported_in_our_words(device: torch.device) -> None:
    size = 1 << 60 if device.type == "cpu" else torch.cuda.mem_get_info(device)[1] + MiB
    ledger = Ledger(Budget(tier=Tier.DEVICE, limit_bytes=2 * size, given="vram='too much'"))
    with pytest.raises(OutOfBudget, match="the device itself is full"):
        DeviceBlock(device, size, ledger=ledger, tag=Tag.PARAMETERS)
    assert ledger.used_bytes(Tier.DEVICE) == 0
    assert float(torch.ones(3, device=device).sum()) == 3
