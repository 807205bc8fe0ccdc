"""Lanes that are CUDA streams. The host only enqueues; ordering, reuse and signals happen on the GPU."""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from ...core.errors import LaneError, SettingError
from ...core.events import Sink, Span, What
from ...core.sizes import MiB
from ...core.tags import Tag
from ..cuda.clock import CudaClock
from ..cuda.driver import Driver, device_index, driver
from ..cuda.streams import OwnStream
from .flags import Flag
from .lane import Delay, Event, Lane, as_bytes, check_copy

_TOGETHER = 32  # spans that are looked at together


class CudaEvent(Event):
    """A CUDA event. Lanes that a thread feeds override ``enqueued``, since their event may not be recorded yet."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.Event()

    def done(self) -> bool:
        return bool(self.cuda.query())

    def synchronize(self) -> None:
        wait_for(self.cuda)

    def enqueued(self) -> None:
        """Block until the event is in its stream. A wait for an event that is not would pass at once."""


class CudaLane(Lane):
    """A stream of its own, or with ``own_stream=False`` the stream that is current at each call."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        clock: CudaClock,
        *,
        own_stream: bool,
        sink: Sink | None = None,
        delay: Delay | None = None,
    ) -> None:
        self.name, self.device_index, self.clock = name, device_index(device), clock
        self._driver = need_driver()
        self._own = OwnStream(self._driver, self.device_index) if own_stream else None
        self._delay = delay
        self._timer = None if sink is None else EventTimer(sink, clock)
        # The handle of the stream that was current last, and torch's object for it, which takes microseconds to make:
        # each weight that backward asks for asks for the stream. One tuple: threads have different current streams.
        self._current: tuple[int, torch.cuda.Stream] | None = None

    @property
    def stream(self) -> torch.cuda.Stream:
        if self._own is not None:
            return self._own.stream
        private: Any = torch._C
        handle, current = private._cuda_getCurrentRawStream(self.device_index), self._current
        if current is None or current[0] != handle:
            current = self._current = handle, torch.cuda.current_stream(self.device_index)
        return current[1]

    def copy(self, target: torch.Tensor, source: torch.Tensor, tag: Tag, unit: int | None = None) -> None:
        size = check_copy(target, source)
        if size == 0:
            return
        self._wait_out_delay()
        stream, to, by = self.stream, target.data_ptr(), source.data_ptr()
        host = [address for side, address in ((target, to), (source, by)) if side.device.type == "cpu"]
        start = None if self._timer is None else self._timer.mark(stream)
        if not self._driver.copy(self.device_index, stream.cuda_stream, to, by, size, host=host):
            # A copy of pageable memory blocks the host until the stream has caught up; behind a flag that is forever.
            raise SettingError("A CUDA lane copies page-locked memory only. Take it from a pinned HostArena.")
        if self._timer is not None and start is not None:
            self._timer.finish(stream, start, What.COPY, self.name, tag, size, unit)

    def fill(self, target: torch.Tensor, byte: int) -> None:
        self._wait_out_delay()
        stream, target = self.stream, as_bytes(target)
        with torch.cuda.stream(stream):
            if target.is_cuda:
                target.fill_(byte)
                return
            # The host would do it at once, before the events that this lane waits for.
            source = torch.full((min(target.nbytes, MiB),), byte, dtype=torch.uint8, device=stream.device)
            for part in target.split(MiB):
                self._driver.copy(
                    self.device_index, stream.cuda_stream, part.data_ptr(), source.data_ptr(), part.nbytes
                )

    def record(self) -> Event:
        event = CudaEvent()
        event.cuda.record(self.stream)
        return event

    def place(self) -> Hashable:
        return self.stream

    def record_at(self, place: Hashable) -> Event:
        assert isinstance(place, torch.cuda.Stream)
        event = CudaEvent()
        event.cuda.record(place)
        return event

    def wait(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            event.enqueued()
            self.stream.wait_event(event.cuda)
        else:  # an event of the CPU's: only the host can wait for it
            event.synchronize()

    def write_flag(self, flag: Flag, value: int) -> None:
        flag.board.raise_if_aborted()
        if flag.device_address is None:  # the driver cannot write it: the host waits and writes
            self.record().synchronize()
            flag.set(value)
        else:
            self._driver.write_value(self.device_index, self.stream.cuda_stream, flag.device_address, value)

    def wait_flag(self, flag: Flag, value: int) -> None:
        if flag.device_address is None:
            flag.wait(value)
        else:
            flag.expect(value)
            self._driver.wait_value(self.device_index, self.stream.cuda_stream, flag.device_address, value)

    def synchronize(self) -> None:
        self.record().synchronize()
        self.emit()

    def emit(self) -> None:
        if self._timer is not None:
            self._timer.emit()

    def close(self) -> None:
        if self._own is None or self._own.closed:
            return
        # A GPU that failed fails here again; the error was raised where it happened.
        with contextlib.suppress(LaneError, RuntimeError):
            self.synchronize()
        self._own.close()

    def _wait_out_delay(self) -> None:
        if self._delay is not None:
            with torch.cuda.stream(self.stream):
                self._delay()


def wait_for(event: torch.cuda.Event) -> None:
    """Block until ``event``, in short naps: torch's own wait cannot be interrupted, and might never end."""
    while not event.query():
        time.sleep(50e-6)


class Timed(NamedTuple):
    """Work between two events, which are on one stream."""

    start: torch.cuda.Event
    end: torch.cuda.Event
    what: What
    name: str
    tag: Tag | None
    size: int
    unit: int | None


class EventTimer:
    """Times work with events on its stream and emits spans once they are over, never by waiting.

    A step has a thousand of them, and each question to the driver takes a microsecond. So it asks for many at once:
    what ends on one stream ends in order, and the last one that has ended is found by bisection."""

    def __init__(self, sink: Sink, clock: CudaClock) -> None:
        self._sink, self._clock = sink, clock
        self._lock = threading.RLock()  # a lane's thread and the thread that synchronizes it both emit
        self._is_emitting = False  # a signal handler may look while this thread emits
        self._pending: defaultdict[int, deque[Timed]] = defaultdict(deque)  # by stream
        self._emit_at: dict[int, int] = {}  # how many may be pending before the next look; by stream

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Call just before the work is enqueued on ``stream``."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def finish(
        self,
        stream: torch.cuda.Stream,
        start: torch.cuda.Event,
        what: What,
        name: str,
        tag: Tag | None = None,
        size: int = 0,
        unit: int | None = None,
    ) -> None:
        """Call just after the work was enqueued."""
        pending = self._pending[stream.cuda_stream]
        pending.append(Timed(start, self.mark(stream), what, name, tag, size, unit))
        if len(pending) >= self._emit_at.get(stream.cuda_stream, _TOGETHER):
            self.emit()

    def emit(self) -> None:
        """Send the spans of what has ended."""
        with self._lock:
            if self._is_emitting:
                return
            self._is_emitting = True
            try:
                for stream, pending in list(self._pending.items()):
                    for _ in range(_ended(pending)):
                        start, end, what, name, tag, size, unit = pending.popleft()
                        self._sink(Span(what, *self._clock.span(start, end), name, tag, size, unit))
                    self._emit_at[stream] = len(pending) + _TOGETHER
            finally:
                self._is_emitting = False


def _ended(pending: deque[Timed]) -> int:
    """How many of them have ended, from the first on."""
    return bisect.bisect_left(range(len(pending)), 1, key=lambda number: not pending[number].end.query())


def need_driver() -> Driver:
    cuda = driver()
    if cuda is None:
        raise LaneError("The CUDA driver library is gone.")
    return cuda
