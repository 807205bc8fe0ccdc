from __future__ import annotations

import pytest
import torch

from stormtorch.core.budget import Budget
from stormtorch.core.errors import OutOfBudget
from stormtorch.core.sizes import MiB
from stormtorch.core.tags import Tag, Tier
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.pools.device import charged_bytes

CPU = torch.device("cpu")


def test_a_block_beyond_the_budget_is_refused_before_it_is_allocated() -> None:
    ledger = Ledger(Budget(tier=Tier.DEVICE, limit_bytes=MiB, given="vram='1MiB'"))
    with pytest.raises(OutOfBudget, match=r"1\.5 MiB on the device for PARAMETERS .*vram='1MiB'"):
        charged_bytes(CPU, 3 * MiB // 2, ledger=ledger, tag=Tag.PARAMETERS)
    assert ledger.used_bytes(Tier.DEVICE) == 0


def test_the_charge_is_whole_grains_until_it_is_released(device: torch.device, ledger: Ledger) -> None:
    data, charge = charged_bytes(device, 1000, ledger=ledger, tag=Tag.OPTIMIZER)
    assert (data.nbytes, data.device) == (1000, device)
    assert ledger.used_bytes(Tier.DEVICE) == 1024
    charge.release()
    assert ledger.used_bytes(Tier.DEVICE) == 0


def test_a_full_device_is_reported_in_our_words(device: torch.device) -> None:
    size = 1 << 60 if device.type == "cpu" else torch.cuda.mem_get_info(device)[1] + MiB
    ledger = Ledger(Budget(tier=Tier.DEVICE, limit_bytes=2 * size, given="vram='too much'"))
    with pytest.raises(OutOfBudget, match="the device itself is full"):
        charged_bytes(device, size, ledger=ledger, tag=Tag.PARAMETERS)
    assert ledger.used_bytes(Tier.DEVICE) == 0
    assert float(torch.ones(3, device=device).sum()) == 3
