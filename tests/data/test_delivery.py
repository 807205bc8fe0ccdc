"""Batches on their way to a device, when that goes wrong. What goes right is seen through the loader."""

from __future__ import annotations

import time

import pytest
import torch

from stormtorch.core.errors import LaneError
from stormtorch.core.tags import Tag
from stormtorch.data.delivery.to_device import LaneDelivery
from stormtorch.data.source import Field
from stormtorch.memory.books.ledger import Ledger


def test_nobody_writes_to_a_parcel_whose_sending_failed(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is freed then, and its memory may be anybody's."""
    fields = [Field(name=name, dtype=torch.float32, shape=(8,)) for name in ("x", "y")]
    delivery = LaneDelivery(torch.device("cpu"), fields, 4, ledger, batches=1, ahead=1, delay=lambda: time.sleep(0.05))
    assert delivery.grow(1)
    batch = delivery.take(4, block=True)
    assert batch is not None
    for memory in batch.fields:
        memory.zero_()
    assert delivery._lanes is not None
    lane, targets = delivery._lanes.load, list[torch.Tensor]()
    copy = lane.copy

    def fail_second(target: torch.Tensor, source: torch.Tensor, tag: Tag) -> None:
        if targets:
            raise LaneError("no copy for the second field")
        targets.append(target)
        copy(target, source, tag)

    monkeypatch.setattr(lane, "copy", fail_second)
    with pytest.raises(LaneError, match="the second field"):
        delivery.send(batch)
    targets[0].fill_(7)
    lane.synchronize()
    assert torch.equal(targets[0], torch.full_like(targets[0], 7))
    delivery.close()
