"""Page-locking of host memory, the precondition of a copy that overlaps with compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..cuda.driver import Driver, device_index, driver


class PageLock(Protocol):
    """Locks ranges for one kind of device. ``lock`` raises StormError if the range is refused, and then has changed
    nothing."""

    def lock(self, address: int, size: int) -> None: ...

    def unlock(self, address: int) -> None: ...


@dataclass(frozen=True)
class CudaPageLock:
    """Registers memory that we mapped ourselves with the CUDA driver, for all devices; ``device``: any one in use."""

    cuda: Driver
    device: int

    def lock(self, address: int, size: int) -> None:
        self.cuda.register(self.device, address, size)

    def unlock(self, address: int) -> None:
        self.cuda.unregister(self.device, address)


def page_lock_for(device: torch.device) -> PageLock | None:
    """Page-locking for ``device``; None if the device needs none, such as the CPU."""
    if device.type != "cuda":
        return None
    cuda = driver()
    return None if cuda is None else CudaPageLock(cuda, device_index(device))
