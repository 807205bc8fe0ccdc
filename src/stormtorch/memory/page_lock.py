"""Page-locking of host memory, the precondition of a copy that overlaps with compute."""

from __future__ import annotations

from typing import Protocol

import torch

from .cuda_driver import Driver, driver


class PageLock(Protocol):
    """Locks ranges for one kind of device.

    ``lock`` raises StormError if the range is refused, and then has changed nothing.
    """

    def lock(self, address: int, size: int) -> None: ...

    def unlock(self, address: int) -> None: ...


class CudaPageLock:
    """Registers memory that we mapped ourselves with the CUDA driver."""

    def __init__(self, cuda: Driver) -> None:
        self._cuda = cuda

    def lock(self, address: int, size: int) -> None:
        self._cuda.register(address, size)

    def unlock(self, address: int) -> None:
        self._cuda.unregister(address)


def page_lock_for(device: torch.device) -> PageLock | None:
    """How to page-lock memory for ``device``; None where that means nothing, as for a CPU device."""
    if device.type != "cuda":
        return None
    cuda = driver()
    return None if cuda is None else CudaPageLock(cuda)
