"""Lanes for a device that is host memory: worker threads, so that copies really happen later than asked for."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable

import torch

from ..core.errors import LaneError
from ..core.records import Copied, Sink
from ..core.tags import Tag
from .flags import Flag
from .lane import Delay, Event, Lane, check_copy

Work = Callable[[], None]


class Failure:
    """The first error of a lane; its events share it, so that waiting on one raises and never passes stale data."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.error: BaseException | None = None

    def raise_if_any(self) -> None:
        if self.error is not None:
            raise LaneError(f"Work on the {self.lane} lane failed: {self.error}") from self.error


def wait_interruptibly(event: threading.Event) -> None:
    """Wait without a limit, but let Ctrl-C through: one that arrives just as a wait begins is seen when it ends."""
    while not event.wait(0.2):
        pass


class CpuEvent(Event):
    """Set by the lane's thread when it gets there."""

    def __init__(self, failure: Failure | None = None) -> None:
        self._failure = failure
        self.reached = threading.Event()
        if failure is None:  # recorded where work is done as it is asked for
            self.reached.set()

    def done(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        wait_interruptibly(self.reached)
        if self._failure is not None:
            self._failure.raise_if_any()


class ThreadLane(Lane):
    """A lane whose work is done by a thread of its own, in order. Subclasses say what a copy is.

    After a failure the thread goes on: it skips work, reaches events (whose waiters then raise) and aborts flags, so
    that nobody hangs.
    """

    def __init__(self, name: str, delay: Delay | None = None) -> None:
        self.name = name
        self._failure = Failure(name)
        self._queue: queue.SimpleQueue[tuple[Work, bool] | None] = queue.SimpleQueue()
        self._delay = delay
        self._thread = threading.Thread(
            target=_run, args=(self._queue, self._failure), name=f"storm-{name}", daemon=True
        )
        self._thread.start()
        # The thread knows the queue, not the lane: a lane that is dropped without close() still ends its thread.
        self._finalizer = weakref.finalize(self, self._queue.put, None)

    def enqueue(self, work: Work, *, always: bool = False) -> None:
        """Queue ``work``; with ``always`` it runs even after a failure."""
        self._failure.raise_if_any()
        if not self._finalizer.alive:
            raise LaneError(f"The {self.name} lane was closed.")
        if self._delay is not None:
            self._queue.put((self._delay, False))
        self._queue.put((work, always))

    def record(self) -> Event:
        event = CpuEvent(self._failure)
        self.enqueue(event.reached.set, always=True)
        return event

    def wait(self, event: Event) -> None:
        self.enqueue(event.synchronize)

    def write_flag(self, flag: Flag, value: int) -> None:
        failure = self._failure

        def write() -> None:
            if failure.error is None:
                flag.set(value)
            else:
                flag.board.abort(failure.error)

        self.enqueue(write, always=True)

    def wait_flag(self, flag: Flag, value: int) -> None:
        flag.expect(value)

        def wait() -> None:
            flag.wait(value)

        self.enqueue(wait)

    def synchronize(self) -> None:
        self.record().synchronize()

    def close(self) -> None:
        self._finalizer()
        if self._thread is not threading.current_thread():
            self._thread.join()


class CpuLane(ThreadLane):
    """Copies within host memory."""

    def __init__(self, name: str, sink: Sink | None = None, delay: Delay | None = None) -> None:
        super().__init__(name, delay)
        self._sink = sink
        self._origin_s = time.perf_counter()

    def copy(self, target: torch.Tensor, source: torch.Tensor, tag: Tag) -> None:
        size = check_copy(target, source)
        name, sink, origin_s = self.name, self._sink, self._origin_s

        def copy() -> None:
            start_s = time.perf_counter()
            target.copy_(source)
            if sink is not None:
                sink(Copied(name, tag, size, start_s - origin_s, time.perf_counter() - start_s))

        self.enqueue(copy)

    def fill(self, target: torch.Tensor, byte: int) -> None:
        def fill() -> None:
            target.view(torch.uint8).fill_(byte)

        self.enqueue(fill)


class CpuComputeLane(Lane):
    """The calling thread itself: work is done when it is asked for, and waiting blocks."""

    name = "compute"

    def copy(self, target: torch.Tensor, source: torch.Tensor, tag: Tag) -> None:  # noqa: ARG002
        check_copy(target, source)
        with torch.no_grad():
            target.copy_(source)

    def fill(self, target: torch.Tensor, byte: int) -> None:
        target.detach().view(torch.uint8).fill_(byte)

    def record(self) -> Event:
        return CpuEvent()

    def wait(self, event: Event) -> None:
        event.synchronize()

    def write_flag(self, flag: Flag, value: int) -> None:
        flag.set(value)

    def wait_flag(self, flag: Flag, value: int) -> None:
        flag.wait(value)

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass


def _run(work_queue: queue.SimpleQueue[tuple[Work, bool] | None], failure: Failure) -> None:
    torch.set_grad_enabled(False)  # per thread; copies are transport and must never be recorded
    while (item := work_queue.get()) is not None:
        work, always = item
        if failure.error is not None and not always:
            continue
        try:
            work()
        except BaseException as error:
            failure.error = failure.error or error
        del item, work  # let go of the tensors before blocking on the next item
