"""Measures how full a device is: bytes that this process has allocated there, now and at the peak."""

from __future__ import annotations

from typing import Protocol

import torch

from .allocator import lost_bytes, untaken_bytes


class DeviceMeter(Protocol):
    """Readings in bytes. Tests provide their own, for a device that does not count."""

    def allocated(self) -> int:
        """Bytes allocated now."""

    def peak(self) -> int:
        """The peak so far."""

    def forget_peak(self) -> None:
        """Forget the peak: it says nothing about what is to come."""

    def free(self) -> int:
        """Bytes of the device that can still be taken, given what all processes use."""

    def lost(self, limit_bytes: int, least_bytes: int = 0) -> int:
        """Bytes of ``limit_bytes`` lost to holes; where this matters, at least ``least_bytes``."""


class CudaMeter:
    """Torch's own counters of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._most_bytes = 0  # the highest peak seen; user code may reset torch's

    def allocated(self) -> int:
        # Like torch.cuda.memory_allocated, which first sorts all its numbers: this is called per block.
        found = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(found["allocated_bytes"]["all"]["current"]) if found else 0

    def peak(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device)
        self._most_bytes = max(self._most_bytes, peak)
        return peak

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._most_bytes = 0

    def free(self) -> int:
        return untaken_bytes(self._device)

    def lost(self, limit_bytes: int, least_bytes: int = 0) -> int:
        self.peak()
        return lost_bytes(self._device, limit_bytes, most_allocated=self._most_bytes, least_bytes=least_bytes)


def device_meter_for(device: torch.device) -> DeviceMeter | None:
    """A meter for ``device``; None if its memory is not counted."""
    return CudaMeter(device) if device.type == "cuda" else None
