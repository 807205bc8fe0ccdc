"""Page-locking of host memory, the precondition of a copy that overlaps with compute."""

from __future__ import annotations

from typing import Protocol

import torch

from ..cuda.driver import Driver, device_index, driver


class PageLock(Protocol):
    """Locks ranges for one kind of device.

    ``lock`` raises StormError if the range is refused, and then has changed nothing.
    """

    def lock(self, address: int, size: int) -> None: ...

    def unlock(self, address: int) -> None: ...


class CudaPageLock:
    """Registers memory that we mapped ourselves with the CUDA driver."""

    def __init__(self, cuda: Driver, device: int) -> None:
        """``device``: any device in use; the memory is locked for all of them, and any thread may call."""
        self._cuda, self._device = cuda, device

    def lock(self, address: int, size: int) -> None:
        self._cuda.register(self._device, address, size)

    def unlock(self, address: int) -> None:
        self._cuda.unregister(self._device, address)


def page_lock_for(device: torch.device) -> PageLock | None:
    """Page-locking for ``device``; None if the device needs none, such as the CPU."""
    if device.type != "cuda":
        return None
    cuda = driver()
    return None if cuda is None else CudaPageLock(cuda, device_index(device))
