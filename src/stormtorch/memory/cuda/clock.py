"""The GPU's times on the host's clock."""

from __future__ import annotations

import time

import torch

from .driver import Driver
from .streams import OwnStream

_TRIES = 5  # the first one may load code into the GPU
_MOVES_S = 10.0  # CUDA measures in float32 milliseconds: 1 µs at 10 s, but 0.25 ms at an hour


class CudaClock:
    """Maps timing events of one device to ``time.perf_counter``. Thread-safe; waits in the constructor only."""

    def __init__(self, cuda: Driver, index: int) -> None:
        own = OwnStream(cuda, index)  # an empty stream: the wait does not include the user's work
        anchors = [_anchor(own.stream) for _ in range(_TRIES)]
        own.close()
        _, self._anchor = min(anchors, key=lambda anchor: anchor[0])

    def span(self, start: torch.cuda.Event, end: torch.cuda.Event) -> tuple[float, float]:
        """When ``start`` and ``end`` were, which must be over."""
        anchor, anchor_s = self._anchor
        since_s = anchor.elapsed_time(start) / 1e3
        start_s = anchor_s + since_s
        if since_s > _MOVES_S:  # the anchor moves along, else the times become coarse
            self._anchor = start, start_s
        return start_s, start_s + start.elapsed_time(end) / 1e3


def _anchor(stream: torch.cuda.Stream) -> tuple[float, tuple[torch.cuda.Event, float]]:
    """How far its time may be off, and an event with its time."""
    event = torch.cuda.Event(enable_timing=True)
    before_s = time.perf_counter()
    event.record(stream)
    while not event.query():  # torch's own wait lets no Ctrl-C through
        pass
    after_s = time.perf_counter()
    return after_s - before_s, (event, (before_s + after_s) / 2)
