"""CUDA lanes for memory that could not be page-locked: a thread feeds the stream through a small page-locked ring.

A copy between pageable memory and a GPU blocks its caller. Here a thread is blocked instead of the training loop, and
the bytes pass through pieces of a ring, so that the copy into one piece overlaps with the transfer of another.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque

import torch

from ...core.errors import SettingError
from ...core.events import Sink, What
from ...core.sizes import MiB, round_down
from ...core.tags import Tag
from ..cuda.clock import CudaClock
from ..cuda.driver import device_index
from ..cuda.streams import OwnStream
from .cuda import CudaEvent, EventTimer, need_driver, wait_for
from .lane import Delay, Event, as_bytes, check_copy
from .thread import Failure, ThreadLane, wait_interruptibly

_PIECES = 4
RING_BYTES = 64 * MiB
"""Rings of both lanes together: 8 MiB a piece, where the link is at its full rate and more brings nothing."""


class StagedEvent(CudaEvent):
    """A CUDA event that the lane's thread records when it gets there."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self._failure = failure
        self._enqueued = threading.Event()

    def record(self, stream: torch.cuda.Stream) -> None:
        try:
            self.cuda.record(stream)
        finally:
            self._enqueued.set()

    def enqueued(self) -> None:
        wait_interruptibly(self._enqueued, self._failure)

    def done(self) -> bool:
        return self._enqueued.is_set() and super().done()

    def synchronize(self) -> None:
        self.enqueued()
        super().synchronize()


class StagedCudaLane(ThreadLane):
    """One direction between pageable host memory and the GPU. ``ring`` is page-locked memory that this lane alone
    uses."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        ring: torch.Tensor,
        clock: CudaClock,
        sink: Sink | None = None,
        delay: Delay | None = None,
    ) -> None:
        self._own = OwnStream(need_driver(), device_index(device))
        self._stream = self._own.stream
        super().__init__(name, sink, delay, inside=torch.cuda.stream(self._stream))
        piece = round_down(ring.numel() // _PIECES, 64)
        if piece == 0:
            raise SettingError(f"A ring of {ring.numel()} bytes is too small for a lane. Give {RING_BYTES} for both.")
        self._pieces = deque((ring[i * piece : (i + 1) * piece], torch.cuda.Event()) for i in range(_PIECES))
        self._timer = None if sink is None else EventTimer(sink, clock)

    def copy(self, target: torch.Tensor, source: torch.Tensor, tag: Tag, unit: int | None = None) -> None:
        size = check_copy(target, source)
        if size == 0:
            return
        name, stream, pieces, timer = self.name, self._stream, self._pieces, self._timer

        def copy() -> None:
            move = _load if source.device.type == "cpu" else _store
            start = timer.mark(stream) if timer is not None else None
            move(as_bytes(target), as_bytes(source), pieces, stream)
            if timer is not None and start is not None:
                timer.finish(stream, start, What.COPY, name, tag, size, unit)

        self.enqueue(copy)

    def record(self) -> Event:
        event, stream = StagedEvent(self._failure), self._stream
        self.enqueue(lambda: event.record(stream), always=True)
        return event

    def synchronize(self) -> None:
        super().synchronize()
        self.emit()

    def emit(self) -> None:
        if self._timer is not None:
            self._timer.emit()

    def close(self) -> None:
        super().close()
        if not self._own.closed:
            with contextlib.suppress(RuntimeError):  # a GPU that failed fails here again
                self.settle()  # copies out of the ring may still be running
            self._own.close()

    def settle(self) -> None:
        event = torch.cuda.Event()
        event.record(self._stream)
        wait_for(event)


Pieces = deque[tuple[torch.Tensor, torch.cuda.Event]]


def _load(target: torch.Tensor, source: torch.Tensor, pieces: Pieces, stream: torch.cuda.Stream) -> None:
    """Host to device: fill a piece as soon as its last transfer has ended, and send it off."""
    step = pieces[0][0].numel()
    for start in range(0, source.numel(), step):
        piece, sent = pieces[0]
        pieces.rotate(-1)
        sent.synchronize()
        part = source[start : start + step]
        piece[: part.numel()].copy_(part)
        target[start : start + step].copy_(piece[: part.numel()], non_blocking=True)
        sent.record(stream)


def _store(target: torch.Tensor, source: torch.Tensor, pieces: Pieces, stream: torch.cuda.Stream) -> None:
    """Device to host: keep the ring's pieces in flight, empty the oldest. All bytes are in ``target`` on return."""
    step = pieces[0][0].numel()
    flying: deque[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event]] = deque()

    def land() -> None:
        part, piece, arrived = flying.popleft()
        arrived.synchronize()
        part.copy_(piece)

    for start in range(0, source.numel(), step):
        if len(flying) == len(pieces):
            land()
        piece, arrived = pieces[0]
        pieces.rotate(-1)
        part = target[start : start + step]
        piece[: part.numel()].copy_(source[start : start + step], non_blocking=True)
        arrived.record(stream)
        flying.append((part, piece[: part.numel()], arrived))
    while flying:
        land()
