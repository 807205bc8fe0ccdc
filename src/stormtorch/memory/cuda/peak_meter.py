"""The peak of a process on its device that later steps will reach again: torch's peak, plus memory taken since.

Memory that is taken between two steps, when activations are gone, does not raise the peak until the next step has
ended. A planner that uses torch's peak meanwhile would give the same bytes away twice."""

from __future__ import annotations

from collections.abc import Callable

from .device_meter import DeviceMeter


class PeakMeter:
    def __init__(self, measured: Callable[[], int]) -> None:
        """``measured``: the peak so far."""
        self._measured = measured
        self._at_growth, self._unseen = 0, 0
        self.grown_bytes = 0  # all bytes taken between steps

    def grew(self, size: int) -> None:
        """Note ``size`` bytes that were taken permanently, outside of a step."""
        self._unseen = (self._unseen if self._measured() <= self._at_growth else 0) + size
        self._at_growth = self._measured()
        self.grown_bytes += size

    def seen_bytes(self) -> int:
        """The peak as torch reports it."""
        return self._measured()

    @property
    def unseen_bytes(self) -> int:
        """Bytes taken since that are not in that peak yet."""
        return 0 if self._measured() > self._at_growth else self._unseen

    def bytes(self) -> int:
        return self.seen_bytes() + self.unseen_bytes


def peak_meter_on(meter: DeviceMeter | None) -> PeakMeter:
    return PeakMeter(meter.peak if meter is not None else lambda: 0)
