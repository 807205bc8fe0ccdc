"""Buckets for gradients: a load into a bucket waits for the last use of the bucket's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stormtorch.core.tags import Tag
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.lanes.build import Lanes, open_lanes
from stormtorch.memory.lanes.lane import Event
from stormtorch.memory.pools.pool import DevicePool
from stormtorch.streams.gradients.buckets import Buckets


class Reading(Event):
    """Work of compute that has not ended."""

    def done(self) -> bool:
        return False

    def synchronize(self) -> None:
        """The pool is closed."""


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    opened = open_lanes(torch.device("cpu"))
    yield opened
    opened.close()


@pytest.mark.parametrize("used_before", [False, True])
def test_a_load_waits_for_the_last_use(
    lanes: Lanes, ledger: Ledger, used_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = DevicePool(lanes.device, ledger=ledger, tag=Tag.PARAMETERS, lanes=lanes, sink=lambda _: None)
    pool.grow(8192)
    weights = pool.take(8192, lanes.load)
    assert weights is not None
    pool.give(weights, reading := Reading())  # a unit that was evicted, and that compute still reads
    by_compute, by_load = list[Event](), list[Event]()
    monkeypatch.setattr(lanes.compute, "wait", by_compute.append)
    monkeypatch.setattr(lanes.load, "wait", by_load.append)
    room: Any = SimpleNamespace(room=lambda size, lane, _: pool.take(size, lane), give=pool.give)
    waits: Any = SimpleNamespace(wait=lambda event, *_: lanes.compute.wait(event))
    buckets = Buckets(room, lanes, waits, poison=None)
    buckets.open(4096)
    assert by_compute == [reading] * 2
    uses = [Reading(), Reading()] if used_before else []
    for use in uses:
        buckets.lend(4096)
        buckets.take_back(use)
    assert by_load == []
    buckets.lend(4096, for_load=True)
    # A new bucket: what compute waits for. One that was used: its own last use, not the other's.
    assert len(by_load) == 1
    assert (by_load == uses[:1]) == used_before
    buckets.take_back(Reading())
    buckets.close()
    pool.close()
