"""Law: whatever the timing, data that streams through tiers smaller than itself comes back with the right numbers.

Every lane is delayed at random and every released piece is overwritten with NaN, so that a missing wait, on the lane's
side or on compute's, is a wrong number in every run and not in one of a thousand.
"""

from __future__ import annotations

import random
import time

import pytest
import torch

from stormtorch.core.tags import Tag, Tier
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.host.arena import HostArena
from stormtorch.memory.host.pinning import page_lock_for
from stormtorch.memory.lanes.build import open_lanes
from stormtorch.memory.lanes.flags import Flags
from stormtorch.memory.lanes.lane import Delay
from stormtorch.memory.pools.pool import DevicePool
from stormtorch.native.adamw import adamw_
from stormtorch.native.update import AdamStep, AdamTensors
from stormtorch.native.worker.open import open_worker

UNITS, ELEMENTS, STEPS = 6, 3000, 4


def jitter(device: torch.device, seed: int) -> Delay:
    chance = random.Random(seed)
    if device.type == "cpu":
        return lambda: time.sleep(chance.random() * 1e-3)
    return lambda: torch.cuda._sleep(int(chance.random() * 1e6))


@pytest.mark.parametrize("seed", range(3))
def test_a_training_step_in_miniature_is_the_same_as_in_place(device: torch.device, ledger: Ledger, seed: int) -> None:
    """Weights go up, a gradient comes down, the CPU worker updates behind a flag, and the next load waits for its flag.

    This is the loop that training will run, without a model: all parts of the foundation together, the host never
    waiting.
    """
    lock = page_lock_for(device)
    arena = HostArena(UNITS * ELEMENTS * 20 + (1 << 16), ledger=ledger, tag=Tag.PARAMETERS, page_lock=lock)
    homes = [
        {name: arena.tensor((ELEMENTS,), torch.float32) for name in ("weight", "exp_avg", "exp_avg_sq", "grad")}
        for _ in range(UNITS)
    ]
    for index, home in enumerate(homes):
        torch.manual_seed(index)
        home["weight"].normal_()
    plain = [{name: tensor.clone() for name, tensor in home.items()} for home in homes]

    lanes = open_lanes(device, delay=jitter(device, seed))
    pool = DevicePool(device, ledger=ledger, tag=Tag.PARAMETERS, lanes=lanes, poison=lanes.load)
    pool.grow(2 * 12288)
    arrived = Flags(UNITS, ledger=ledger, device=device, page_lock=lock)
    updated = Flags(UNITS, ledger=ledger, device=device, page_lock=lock)
    with open_worker() as worker:
        for step in range(1, STEPS + 1):
            numbers = AdamStep(lr=0.1, step=step)
            for index, home in enumerate(homes):
                piece = pool.take(ELEMENTS * 4, lanes.load)
                assert piece is not None
                lanes.load.wait_flag(updated[index], step - 1)
                there = piece.tensor(torch.float32, ELEMENTS)
                lanes.load.copy(there, home["weight"], Tag.PARAMETERS)
                lanes.compute.wait(lanes.load.record())
                there.mul_(2).add_(index)  # a gradient, in place
                lanes.store.wait(lanes.compute.record())
                lanes.store.copy(home["grad"], there, Tag.GRADIENTS)
                lanes.store.write_flag(arrived[index], step)
                pool.give(piece, lanes.store.record())
                worker.submit(
                    AdamTensors(**home),
                    numbers,
                    priority=index,
                    ready=arrived[index].at(step),
                    done=updated[index].at(step),
                    abort=arrived.aborted.at(1),
                )
                plain[index]["grad"] = plain[index]["weight"] * 2 + index
                adamw_(AdamTensors(**plain[index]), numbers)
        for index in range(UNITS):
            assert updated[index].wait(STEPS, timeout_s=60)
    lanes.synchronize()
    for home, reference in zip(homes, plain, strict=True):
        for name, tensor in home.items():
            assert torch.equal(tensor, reference[name]), f"{name} differs"
    assert ledger.peak_bytes(Tier.DEVICE) == 2 * 12288
    pool.close()
    lanes.close()
    arrived.close()
    updated.close()
    arena.close()
