"""What is made of the driver's answers, with a driver that says what a test wants."""

# ruff: noqa: N802  (the driver names its functions)

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from stormtorch.memory.cuda.driver import Driver, DriverError

_NAMES = {1: b"CUDA_ERROR_INVALID_VALUE", 700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}


class Library:
    """Knows the kinds of memory at some addresses, and what it can do; all else fails with ``code``."""

    def __init__(
        self, *, kinds: dict[int, int] | None = None, code: int = 1, can: dict[int, int] | None = None
    ) -> None:
        self.kinds, self.code, self.can, self.copied = kinds or {}, code, can or {}, 0
        self.parts: list[tuple[int, int, int]] = []

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

    def cuMemcpyAsync(self, target: Any, source: Any, size: Any, _stream: Any) -> int:
        self.copied += 1
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
