"""The pool of rows without the C library: Python threads, the same interface. Each piece is a call under the GIL."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
import time
import weakref
from collections import deque

from ...core.errors import LaneError
from .jobs import DONE, DROPPED, FAILED, PENDING, Pieces, RowsJob, RowsPool, check_pieces, check_process

_CHUNK = 64  # pieces that a thread takes at a time
_IDLE_S = 1.0  # between two checks without jobs, in case an interrupt has cut off a wake-up
_WAIT_S = 0.0005


class _Work:
    """A job and its progress. Guarded by the queue's lock."""

    __slots__ = ("in_flight", "job", "outcome", "taken")

    def __init__(self, job: RowsJob) -> None:
        self.job, self.taken, self.in_flight = job, 0, 0
        self.outcome = (DONE, 0, 0, 0)

    @property
    def is_over(self) -> bool:
        return self.in_flight == 0 and self.taken == len(self.job.pieces)


class _Queue:
    """The jobs and the loop that works on them. Separate from the pool, which the threads must not keep alive.

    Made without threads: the finalizer that ends them must exist before they start, as Ctrl-C may come right after.
    """

    def __init__(self, threads: int) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.waiting: deque[_Work] = deque()
        self.running: set[_Work] = set()
        self.stopping = False
        self.threads = [
            threading.Thread(target=self._loop, name=f"storm-rows-{index}", daemon=True) for index in range(threads)
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def _loop(self) -> None:
        while True:
            with self.lock:
                while not self.waiting and not self.stopping:
                    self.changed.wait(_IDLE_S)
                if not self.waiting:
                    return
                work = self.waiting[0]
                begin = work.taken
                work.taken = end = min(begin + _CHUNK, len(work.job.pieces))
                work.in_flight += 1
                self.running.add(work)
                if end == len(work.job.pieces):
                    self.waiting.popleft()
            failure = _move(work.job.pieces, begin, end)
            with self.lock:
                if failure is not None and work.outcome[0] != FAILED:
                    work.outcome = (FAILED, *failure)
                    self._drop_rest(work)
                work.in_flight -= 1
                self._end_if_over(work)
            del work  # a sleeping thread must not keep the last job's memory alive

    def _drop_rest(self, work: _Work) -> None:
        work.taken = len(work.job.pieces)
        if work in self.waiting:
            self.waiting.remove(work)

    def _end_if_over(self, work: _Work) -> None:
        if work.is_over:
            self.running.discard(work)
            outcome, job = work.job.outcome, work.job
            state, outcome.piece, outcome.error, outcome.got = work.outcome
            job.keep = None
            outcome.state = state  # last: code that sees it may read the other fields

    def cancel(self) -> None:
        with self.lock:
            for work in list(self.waiting):
                work.outcome = (DROPPED, 0, 0, 0)
                self._drop_rest(work)
                self._end_if_over(work)

    def stop(self) -> None:
        if os.getpid() != self.pid:  # the threads remained in the parent
            return
        self.cancel()
        with self.lock:
            self.stopping = True
            self.changed.notify_all()
        for thread in self.threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join()


def _move(pieces: Pieces, begin: int, end: int) -> tuple[int, int, int] | None:
    """Move the pieces; returns (piece, errno, bytes) of the first that failed, or None."""
    for index, (fd, source, size, needed, target, _) in enumerate(pieces[begin:end].tolist(), begin):
        if fd < 0:
            ctypes.memmove(target, source, size)  # releases the GIL
        elif not target:
            with contextlib.suppress(OSError):  # only a hint
                os.posix_fadvise(fd, source, size, os.POSIX_FADV_WILLNEED)
        elif size:
            view = memoryview((ctypes.c_ubyte * size).from_address(target)).cast("B")
            got = 0
            try:
                while got < size and (more := os.preadv(fd, [view[got:]], source + got)):
                    got += more
            except OSError as error:
                if got < needed:
                    return index, error.errno or errno.EIO, got
            if got < needed:
                return index, errno.ENODATA, got
    return None


class ThreadRows(RowsPool):
    """Python threads instead of the native ones."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._queue = _Queue(threads)
        self._finalizer = weakref.finalize(self, self._queue.stop)
        self._queue.start()

    def submit(self, pieces: Pieces, keep: object) -> RowsJob:
        queue = self._queue
        check_pieces(pieces)
        check_process(queue.pid)
        job = RowsJob(pieces, keep)
        with queue.lock:
            if queue.stopping:
                raise LaneError("Cannot read with a pool that was closed. Open another one.")
            if len(pieces) == 0:
                job.outcome.state = DONE
                return job
            queue.changed.notify_all()  # takes effect when the lock is released; Ctrl-C cannot come between
            job.outcome.state = PENDING
            queue.waiting.append(_Work(job))
        return job

    def state(self, job: RowsJob) -> int:
        return int(job.outcome.state)

    def wait(self, job: RowsJob, timeout_s: float | None = None, *, help: bool = False) -> int:  # noqa: ARG002
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while job.outcome.state == PENDING:
            check_process(self._queue.pid)
            if until is not None and time.monotonic() >= until:
                break
            time.sleep(_WAIT_S)
        return int(job.outcome.state)

    def cancel(self) -> None:
        if os.getpid() == self._queue.pid:
            self._queue.cancel()
            while self._queue.running:
                time.sleep(_WAIT_S)

    def close(self) -> None:
        self._queue.stop()
