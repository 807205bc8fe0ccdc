"""Streams outlive their lanes, because torch's allocator remembers them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stormtorch.core.sizes import MiB
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.cuda import allocator as torch_allocator
from stormtorch.memory.cuda import streams as own_streams
from stormtorch.memory.cuda.allocator import expand_segments
from stormtorch.memory.cuda.streams import OwnStream
from stormtorch.memory.lanes.build import open_lanes

GPU = torch.device("cuda", 0)


class _Stream:
    def __init__(self, handle: int, device: int) -> None:
        self.handle, self.device, self.idle = handle, device, True

    def query(self) -> bool:
        return self.idle


class _Driver:
    """Gives streams out and takes none back."""

    def __init__(self) -> None:
        self.created = 0

    def create_stream(self, _device: int) -> int:
        self.created += 1
        return self.created


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "ExternalStream", _Stream)
    monkeypatch.setattr(own_streams, "_spare", own_streams._spare.copy())
    own_streams._spare.clear()
    return _Driver()


def test_the_next_lane_has_the_stream_of_one_that_ended(cuda: Any) -> None:
    for _ in range(200):
        first, second = OwnStream(cuda, 0), OwnStream(cuda, 0)
        assert first.stream is not second.stream
        first.close()
        first.close()  # twice is once
        assert first.closed
        assert not second.closed
        del second  # collected, not closed
    assert cuda.created == 2


def test_never_that_of_another_device_nor_one_that_still_works(cuda: Any) -> None:
    one: Any = OwnStream(cuda, 0)
    one.close()
    other = OwnStream(cuda, 1)
    assert other.stream is not one.stream
    one.stream.idle = False
    third = OwnStream(cuda, 0)
    assert third.stream is not one.stream
    one.stream.idle = True
    assert OwnStream(cuda, 0).stream is one.stream


@pytest.mark.gpu
def test_cuda_memory_of_a_lane_that_ended_goes_back(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in torch_allocator._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(GPU)
    end = expand_segments(GPU)
    try:
        for _ in range(20):
            lanes = open_lanes(GPU, home=None, ledger=ledger)
            for lane in (lanes.load, lanes.store):
                with torch.cuda.stream(lane.stream):  # type: ignore[attr-defined]
                    torch.ones(64 * MiB, dtype=torch.uint8, device=GPU)
            lanes.close()
            assert torch.cuda.memory_reserved(GPU) > before
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved(GPU) == before
    finally:
        end()
