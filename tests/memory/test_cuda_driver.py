"""What is made of the driver's answers, with a driver that says what a test wants."""

# ruff: noqa: N802  (the driver names its functions)

from __future__ import annotations

import ctypes
import time
from typing import Any

import pytest
import torch

from stormtorch.memory.cuda.driver import Driver, DriverError, driver

_NAMES = {1: b"CUDA_ERROR_INVALID_VALUE", 700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}


class Library:
    """Knows the kinds of memory at some addresses, and what it can do; all else fails with ``code``."""

    def __init__(
        self, *, kinds: dict[int, int] | None = None, code: int = 1, can: dict[int, int] | None = None
    ) -> None:
        self.kinds, self.code, self.can, self.copied = kinds or {}, code, can or {}, 0
        self.parts: list[tuple[int, int, int]] = []
        self.order: list[tuple[str, int | None, int | None]] = []  # what was enqueued on which stream, and the event

    def cuPointerGetAttribute(self, answer: Any, _attribute: Any, address: ctypes.c_uint64) -> int:
        if address.value not in self.kinds:
            return self.code
        answer._obj.value = self.kinds[address.value]
        return 0

    def cuDeviceGet(self, answer: Any, index: ctypes.c_int) -> int:
        answer._obj.value = index.value
        return 0

    def cuDeviceGetAttribute(self, answer: Any, attribute: ctypes.c_int, _device: Any) -> int:
        answer._obj.value = self.can.get(attribute.value, 0)
        return 0

    def cuCtxGetCurrent(self, answer: Any) -> int:
        answer._obj.value = 7
        return 0

    def cuStreamCreate(self, answer: Any, _flags: Any) -> int:
        answer._obj.value = 31
        return 0

    def cuEventCreate(self, answer: Any, _flags: Any) -> int:
        answer._obj.value = 77
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        self.order.append(("record", stream.value, event.value))
        return 0

    def cuStreamWaitEvent(self, stream: Any, event: Any, _flags: Any) -> int:
        self.order.append(("wait", stream.value, event.value))
        return 0

    def cuMemcpyAsync(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        self.copied += 1
        self.order.append(("copy", stream.value, None))
        self.parts.append((target.value, source.value, size.value))
        return 0

    def cuGetErrorName(self, code: ctypes.c_int, answer: Any) -> int:
        answer._obj.value = _NAMES[code.value]
        return 0


def driver_on(library: Any) -> Driver:
    driver = Driver(library)
    driver._contexts[0] = 7
    return driver


@pytest.mark.parametrize(("kind", "expected"), [(1, True), (2, False)], ids=["of_the_host", "of_a_device"])
def test_page_locked_memory_is_known_to_the_driver(kind: int, expected: bool) -> None:
    library = Library(kinds={64: kind})
    assert driver_on(library).copy(0, 0, 128, 64, 10, host=[64]) is expected
    assert library.copied == expected


def test_a_large_copy_goes_in_parts_that_are_all_of_it() -> None:
    library, size = Library(kinds={1 << 40: 1}), (200 << 20) + 5
    assert driver_on(library).copy(0, 0, 1 << 30, 1 << 40, size, host=[1 << 40])
    assert len(library.parts) == 4
    reached = 0
    for target, source, part in library.parts:
        assert (target, source) == ((1 << 30) + reached, (1 << 40) + reached)
        reached += part
    assert reached == size


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_parts_alternate_between_two_streams_and_keep_their_order(count: int) -> None:
    """What is enqueued on the lane's stream next comes after all parts."""
    library, size = Library(kinds={1 << 40: 1}), count * (64 << 20)
    driver = driver_on(library)
    assert driver.copy(0, 5, 1 << 30, 1 << 40, size, host=[1 << 40])
    streams = [stream for what, stream, _ in library.order if what == "copy"]
    assert streams == [5, 31, 5, 31][:count]
    here = 5
    for what, stream, event in library.order:
        if what == "record":
            assert (stream, event) == (here, 77)
        elif what == "wait":
            assert (stream, event) == (36 - here, 77)
            here = 36 - here
        else:
            assert stream == here
    assert here == 5


@pytest.mark.parametrize("part", [1, 2, 3])
def test_an_interrupted_copy_keeps_the_order_too(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    library = Library(kinds={1 << 40: 1})
    driver, copy = driver_on(library), library.cuMemcpyAsync

    def interrupted(*arguments: Any) -> int:
        copy(*arguments)
        if library.copied == part:
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(library, "cuMemcpyAsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        driver.copy(0, 5, 1 << 30, 1 << 40, 256 << 20, host=[1 << 40])
    assert library.copied == part
    if part == 2:
        assert library.order[-2:] == [("record", 31, 77), ("wait", 5, 77)]
    else:
        assert library.order[-1] == ("copy", 5, None)


@pytest.mark.gpu
def test_a_small_copy_does_not_wait_for_a_large_one() -> None:
    found = driver()
    assert found is not None
    size = 1 << 30
    here, home = torch.zeros(size, dtype=torch.uint8, device="cuda"), torch.empty(size, dtype=torch.uint8).pin_memory()
    lane, one = torch.cuda.Stream(), torch.ones(1, device="cuda")

    def enqueue() -> float:
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        assert found.copy(0, lane.cuda_stream, home.data_ptr(), here.data_ptr(), size, host=[home.data_ptr()])
        return began_s

    shares = []
    for _ in range(5):
        began_s = enqueue()
        one.item()
        waited_s = time.perf_counter() - began_s
        torch.cuda.synchronize()
        shares.append(waited_s / (time.perf_counter() - began_s))
    assert min(shares) < 0.5, shares


@pytest.mark.gpu
def test_what_follows_a_large_copy_comes_after_it() -> None:
    found = driver()
    assert found is not None
    size = (200 << 20) + 12
    home = torch.arange(size // 4, dtype=torch.int32).pin_memory()
    here, lane = torch.zeros(size // 4, dtype=torch.int32, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    for round_number in range(3):
        home += 1
        assert found.copy(0, lane.cuda_stream, here.data_ptr(), home.data_ptr(), size, host=[home.data_ptr()])
        with torch.cuda.stream(lane):
            seen = here.clone()
        lane.synchronize()
        assert torch.equal(seen.cpu(), home), round_number


def test_memory_that_the_driver_does_not_know_is_pageable() -> None:
    library = Library()
    assert not driver_on(library).copy(0, 0, 128, 64, 10, host=[64])
    assert not library.copied


def test_a_gpu_that_has_failed_is_not_taken_for_pageable_memory() -> None:
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        driver_on(Library(code=700)).copy(0, 0, 128, 64, 10, host=[64])


@pytest.mark.parametrize("can", [{}, {102: 1}, {103: 1}, {102: 1, 103: 1}])
def test_segments_expand_where_memory_can_be_mapped_and_shared(can: dict[int, int]) -> None:
    assert driver_on(Library(can=can)).can_map(0) == (len(can) == 2)
