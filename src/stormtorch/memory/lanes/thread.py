"""Lanes for a device that is host memory: worker threads, so that copies really happen later than requested.

Staged CUDA lanes have such a thread too."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from ...core.errors import LaneError, StorageError
from ...core.events import Sink, Span, What
from ...core.tags import Tag
from .flags import Flag, again
from .lane import Delay, Event, Lane, as_bytes, check_copy

Work = Callable[[], object]
WorkQueue = queue.SimpleQueue[tuple[Work, bool] | None]


class Failure:
    """The first error of a lane; its events share it, so that waiting for one raises and never passes stale data."""

    def __init__(self, lane: str) -> None:
        self.lane, self._owner_pid = lane, os.getpid()
        self.error: BaseException | None = None

    def raise_if_forked(self) -> None:
        """Raise in a forked child, which has no thread to do queued work."""
        if self._owner_pid != os.getpid():
            raise LaneError(f"The {self.lane} lane belongs to the process that opened it. Open lanes after the fork.")

    def raise_if_any(self) -> None:
        if isinstance(self.error, StorageError):  # says all that the user can use
            raise again(self.error)
        if self.error is not None:
            raise LaneError(f"Work on the {self.lane} lane failed: {self.error}") from self.error


def wait_interruptibly(event: threading.Event, failure: Failure | None) -> None:
    """Wait without a limit, but let Ctrl-C through: one that arrives just as a wait begins is seen when it ends. Raises
    the error of the lane that the event belongs to, if that has failed."""
    if failure is not None and not event.is_set():
        failure.raise_if_forked()
    while not event.wait(0.2):
        pass
    if failure is not None:
        failure.raise_if_any()


class CpuEvent(Event):
    """Set by the lane's thread when it gets there."""

    def __init__(self, failure: Failure | None = None) -> None:
        self._failure = failure
        self.reached = threading.Event()
        if failure is None:  # recorded where work is done at once
            self.reached.set()

    def done(self) -> bool:
        if self._failure is not None:
            self._failure.raise_if_any()
        return self.reached.is_set()

    def synchronize(self) -> None:
        wait_interruptibly(self.reached, self._failure)


class CpuComputeLane(Lane):
    """The calling thread itself: work is done at once, and waiting blocks."""

    name = "compute"

    def copy(self, target: torch.Tensor, source: torch.Tensor, tag: Tag, unit: int | None = None) -> None:  # noqa: ARG002
        check_copy(target, source)
        with torch.inference_mode():
            as_bytes(target).copy_(as_bytes(source))

    def fill(self, target: torch.Tensor, byte: int) -> None:
        with torch.inference_mode():
            as_bytes(target).fill_(byte)

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


class ThreadLane(Lane):
    """A lane whose work is done by a thread of its own, in order. Copies within host memory; subclasses copy otherwise.
    After a failure the thread goes on: it skips work, reaches events (whose waiters then raise) and aborts flags, so
    that no thread or stream hangs."""

    def __init__(
        self,
        name: str,
        sink: Sink | None = None,
        delay: Delay | None = None,
        inside: AbstractContextManager[object] = contextlib.nullcontext(),  # noqa: B008
    ) -> None:
        """``inside``: the context in which the thread does all work."""
        self.name, self._sink = name, sink
        self._failure = Failure(name)
        self._queue: WorkQueue = queue.SimpleQueue()
        self._owner_pid = os.getpid()
        self._open_lock = threading.RLock()  # nothing may be queued behind the end; a signal handler may queue, too
        self._thread = threading.Thread(
            target=_run, args=(self._queue, self._failure, inside, delay), name=f"storm-{name}", daemon=True
        )
        # The thread knows the queue, not the lane: a lane that is dropped without close() still ends its thread. So
        # does one whose start was interrupted by Ctrl-C.
        self._finalizer = weakref.finalize(self, self._queue.put, None)
        self._finalizer.atexit = False
        try:
            self._thread.start()
        except RuntimeError as error:
            raise LaneError(f"Cannot start the thread of the {name} lane: {error}. Raise ulimit -u.") from error
        _threads[self._thread] = (self._queue, self._failure)

    def enqueue(self, work: Work, *, always: bool = False) -> None:
        """Queue ``work``; with ``always`` it runs even after a failure."""
        self._failure.raise_if_any()
        self._failure.raise_if_forked()
        with self._open_lock:
            if not self._finalizer.alive:
                raise LaneError(f"The {self.name} lane was closed.")
            self._queue.put((work, always))

    def copy(self, target: torch.Tensor, source: torch.Tensor, tag: Tag, unit: int | None = None) -> None:
        size, name, sink = check_copy(target, source), self.name, self._sink

        def copy() -> None:
            start_s = time.perf_counter()
            as_bytes(target).copy_(as_bytes(source))
            if sink is not None:
                sink(Span(What.COPY, start_s, time.perf_counter(), name, tag, size, unit))

        self.enqueue(copy)

    def fill(self, target: torch.Tensor, byte: int) -> None:
        self.enqueue(lambda: as_bytes(target).fill_(byte))

    def record(self) -> Event:
        event = CpuEvent(self._failure)
        self.enqueue(event.reached.set, always=True)
        return event

    def wait(self, event: Event) -> None:
        self.enqueue(event.synchronize)

    def settle(self) -> None:
        """Block until all work that this lane's thread has started is done. Called on that thread. A copy in host
        memory is done when it returns."""

    def write_flag(self, flag: Flag, value: int) -> None:
        flag.board.raise_if_aborted()
        failure, settle = self._failure, self.settle

        def write() -> None:
            try:
                if failure.error is None:
                    settle()
                    flag.set(value)
            except BaseException as error:
                failure.error = failure.error or error
            if failure.error is not None:  # the data that the flag announces will never be there
                flag.board.abort(failure.error)

        if failure.error is not None:
            flag.board.abort(failure.error)
        self.enqueue(write, always=True)

    def wait_flag(self, flag: Flag, value: int) -> None:
        flag.board.raise_if_aborted()
        self.enqueue(lambda: flag.wait(value))

    def synchronize(self) -> None:
        self.record().synchronize()

    def close(self) -> None:
        with self._open_lock:
            self._finalizer()
        if self._owner_pid == os.getpid() and self._thread is not threading.current_thread():
            while self._thread.is_alive():
                self._thread.join(0.2)  # in short waits, so that Ctrl-C gets through


def _run(work_queue: WorkQueue, failure: Failure, inside: AbstractContextManager[object], delay: Delay | None) -> None:
    # Modes are per thread. Copies are transport: never recorded, and allowed on inference tensors and ordinary ones.
    with torch.inference_mode(), inside:
        while (item := work_queue.get()) is not None:
            work, always = item
            if failure.error is None or always:
                try:
                    if delay is not None and failure.error is None:
                        delay()
                    work()
                except BaseException as error:
                    traceback.clear_frames(error.__traceback__)  # frames hold the tensors of the copy that failed
                    failure.error = failure.error or error
            del item, work  # release the tensors before blocking on the next item


_threads: weakref.WeakKeyDictionary[threading.Thread, tuple[WorkQueue, Failure]] = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """End the threads of lanes that user code has not closed, before the interpreter ends; skips queued work. A thread
    that returns from a copy into an interpreter that is gone takes the whole process down with it."""
    for thread, (work_queue, failure) in list(_threads.items()):
        failure.error = failure.error or LaneError("the interpreter is exiting")
        work_queue.put(None)
        thread.join(1.0)
