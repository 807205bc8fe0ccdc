"""Measures how full a device is: bytes that this process has allocated there, now and at the peak."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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


class PeakMeter:
    """The peak that later steps will reach again: torch's, or what it will be with memory taken since. Memory that is
    taken between two steps, when activations are gone, does not raise the peak until the next step has ended, or raises
    it to the new level alone, without activations. A planner that uses torch's peak meanwhile would give the same bytes
    away twice."""

    def __init__(self, measured: Callable[[], int]) -> None:
        """``measured``: the peak so far."""
        self._measured = measured
        self._expected = 0  # the peak of a step as those before the last growth
        self.grown_bytes = 0  # all bytes taken between steps

    @contextlib.contextmanager
    def growing(self, size: int) -> Iterator[None]:
        """Take ``size`` bytes permanently, outside of a step. An exception: they were not taken."""
        before = self.bytes()
        yield
        self._expected = before + size
        self.grown_bytes += size

    def seen_bytes(self) -> int:
        """The peak as torch reports it."""
        return self._measured()

    @property
    def unseen_bytes(self) -> int:
        """Bytes on top of that peak which the next step is expected to take."""
        return max(0, self._expected - self._measured())

    def bytes(self) -> int:
        return self.seen_bytes() + self.unseen_bytes
