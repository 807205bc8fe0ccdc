"""Measures compute's waits for events of other lanes, each with its cause.

On a GPU two timing events enclose the wait on compute's own stream, and are read once they are over; the host does not
wait. On the CPU the calling thread waits, and a clock measures it.
"""

from __future__ import annotations

import time
from collections import deque

import torch

from ...core.events import Sink, Span, What
from .cuda import CudaLane
from .lane import Event, Lane


class WaitMeter:
    """Makes the compute lane wait, and reports how long it waited."""

    def __init__(self, compute: Lane, sink: Sink) -> None:
        self._compute, self._sink = compute, sink
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event, str, int | None]] = deque()

    def wait(self, event: Event, cause: str, unit: int | None = None) -> None:
        """Make compute wait for ``event``, because of ``cause``; ``unit``: for whose data, for events."""
        if event.done():
            self._compute.wait(event)  # orders memory and raises if the lane has failed; takes no time
            return
        if not isinstance(self._compute, CudaLane):
            start_s = time.perf_counter()
            self._compute.wait(event)
            self._sink(Span(What.WAIT, start_s, time.perf_counter(), cause, unit=unit))
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(self._compute.stream)
        self._compute.wait(event)
        after.record(self._compute.stream)
        self._pending.append((before, after, cause, unit))
        self.emit()

    def emit(self) -> None:
        """Report the waits that are over."""
        while self._pending and self._pending[0][1].query():
            before, after, cause, unit = self._pending.popleft()
            assert isinstance(self._compute, CudaLane)
            self._sink(Span(What.WAIT, *self._compute.clock.span(before, after), cause, unit=unit))
