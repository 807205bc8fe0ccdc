"""How full a device is: what this process has allocated there, now and at the most."""

from __future__ import annotations

from typing import Protocol

import torch

from .allocator import lost_bytes, untaken_bytes


class DeviceMeter(Protocol):
    """In bytes. Tests give one of their own, for a device that does not count."""

    def allocated(self) -> int:
        """What is allocated now."""

    def peak(self) -> int:
        """The most so far."""

    def forget_peak(self) -> None:
        """What came before says nothing about what is to come."""

    def free(self) -> int:
        """What can still be taken of the device, whoever has the rest."""

    def lost(self, limit_bytes: int, least_bytes: int = 0) -> int:
        """What of so many bytes cannot be allocated, for holes in between; if it matters, at least ``least_bytes``."""


class CudaMeter:
    """Torch's own books of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._most_bytes = 0  # that a peak has been seen to be; users reset it when they like

    def allocated(self) -> int:
        # As torch.cuda.memory_allocated, which first makes a sorted table of all its numbers: this is asked per block.
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
    """None where nobody counts."""
    return CudaMeter(device) if device.type == "cuda" else None
