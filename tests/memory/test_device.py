from __future__ import annotations

import pytest
import torch

from stormtorch.core.budget import Budget
from stormtorch.core.errors import OutOfBudget
from stormtorch.core.sizes import MiB
from stormtorch.core.tags import Tag, Tier
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.pools.device import DeviceBlock

CPU = torch.device("cpu")


def test_a_block_beyond_the_budget_is_refused_before_it_is_allocated() -> None:
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
