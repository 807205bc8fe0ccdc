"""The peak of a process on its device that later steps will reach again: torch's peak, or what it will be with memory
taken since.

Memory that is taken between two steps, when activations are gone, does not raise the peak until the next step has
ended, or raises it to the new level alone, without activations. A planner that uses torch's peak meanwhile would give
the same bytes away twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from .device_meter import DeviceMeter


class PeakMeter:
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


def peak_meter_on(meter: DeviceMeter | None) -> PeakMeter:
    return PeakMeter(meter.peak if meter is not None else lambda: 0)
