"""Measures compute's waits for events of other lanes, each with its cause.

On a GPU two timing events enclose the wait on compute's own stream, and are read once they are over; the host does not
wait. On the CPU the calling thread waits, and a clock measures it.
"""

from __future__ import annotations

import time

from ...core.events import Sink, Span, What
from .cuda import CudaLane, EventTimer
from .lane import Event, Lane


class WaitMeter:
    """Makes the compute lane wait, and reports how long it waited."""

    def __init__(self, compute: Lane, sink: Sink) -> None:
        self._compute, self._sink = compute, sink
        self._timer = EventTimer(sink, compute.clock) if isinstance(compute, CudaLane) else None

    def wait(self, event: Event, cause: str, unit: int | None = None) -> None:
        """Make compute wait for ``event``, because of ``cause``; ``unit``: for whose data, for events."""
        if event.done():
            self._compute.wait(event)  # orders memory and raises if the lane has failed; takes no time
        elif self._timer is None or not isinstance(self._compute, CudaLane):
            start_s = time.perf_counter()
            self._compute.wait(event)
            self._sink(Span(What.WAIT, start_s, time.perf_counter(), cause, unit=unit))
        else:
            stream = self._compute.stream
            start = self._timer.mark(stream)
            self._compute.wait(event)
            self._timer.finish(stream, start, What.WAIT, cause, unit=unit)

    def emit(self) -> None:
        """Report the waits that are over."""
        if self._timer is not None:
            self._timer.emit()
