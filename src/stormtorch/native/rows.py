"""Reads pieces of files, and copies pieces of memory, to where they belong, on threads that never need the GIL.

A job is an array of pieces, one line of six int64 each: descriptor, source, bytes, needed, target, map (``PIECE``). A
descriptor below 0 means that the source is an address. A target of 0 means that the bytes are only to be brought into
the page cache. ``needed`` is how many of the bytes must be there where the file ends. ``map`` is what ``map_file``
gave, or 0. See csrc/rows.c.

A job's memory and descriptors belong to the pool until the job is over. Whoever drops a job, or is interrupted in the
middle of anything, leaves them with the pool, which lets go of them when no thread can touch them any more.
"""

from __future__ import annotations

import abc
import ctypes
import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..core.errors import LaneError, SettingError
from ..core.notices import say_once
from .library import Library, RowsOutcome, describe, library

PIECE = ("fd", "source", "bytes", "needed", "target", "map")
PENDING, DONE, FAILED, DROPPED = range(4)
Pieces = NDArray[np.int64]
_NONE: Pieces = np.empty((0, len(PIECE)), dtype=np.int64)
_SLICE_S = 0.1  # longest time inside C at once, so that Ctrl-C is noticed


@dataclass(frozen=True, slots=True)
class Failure:
    """The piece that ended a job: its index, the errno (ENODATA: the file ended), and the bytes that were there."""

    piece: int
    error: int
    got: int


class RowsJob:
    """One job. ``keep`` is what must stay alive until it is over."""

    __slots__ = ("address", "keep", "outcome", "pieces")

    def __init__(self, pieces: Pieces, keep: object) -> None:
        self.pieces, self.keep = pieces, keep
        # PENDING is what taking the job makes it: one that an interrupt kept from its pool must not be waited for.
        self.outcome = RowsOutcome(state=DROPPED)
        self.address = ctypes.addressof(self.outcome)

    def failure(self) -> Failure:
        """What went wrong with a job that failed; of pieces read together, the one that the bytes ended in."""
        piece, got = int(self.outcome.piece), int(self.outcome.got)
        sizes: Any = self.pieces[:, 2]
        while piece + 1 < len(sizes) and got >= sizes[piece] > 0:
            got -= int(sizes[piece])
            piece += 1
        return Failure(piece, int(self.outcome.error), got)


class RowsPool(abc.ABC):
    """Takes jobs and works on them in the order of their arrival. For one thread at a time, except ``close``."""

    threads: int

    @abc.abstractmethod
    def submit(self, pieces: Pieces, keep: object) -> RowsJob:
        """Queue a job; returns at once. ``pieces`` is a contiguous array ``(n, 6)``, not to be changed afterwards."""

    @abc.abstractmethod
    def state(self, job: RowsJob) -> int:
        """PENDING, DONE, FAILED or DROPPED. Does not block. What a job that is DONE has written is then visible."""

    @abc.abstractmethod
    def wait(self, job: RowsJob, timeout_s: float | None = None, *, help: bool = False) -> int:
        """Block until the job is over or the time has passed; its state. Ctrl-C gets through.

        With ``help`` this thread works on the queue until nothing of the job is left to take.
        """

    @abc.abstractmethod
    def cancel(self) -> None:
        """Drop what no thread has begun, and block until all jobs are over: then nothing is read or written."""

    @abc.abstractmethod
    def close(self) -> None:
        """Drop what no thread has begun, wait for the rest, end the threads. Safe to call twice, and after a fork."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Native:
    """The C object and what its jobs need. Apart from the pool, so that it can outlive it for its own ending.

    Made without threads: whoever will end them must know them before they start, as Ctrl-C may come right after.
    """

    def __init__(self, c: ctypes.CDLL) -> None:
        self.c, self.pid, self.lock = c, os.getpid(), threading.RLock()
        self.pointer = ctypes.c_void_p()
        self.held: deque[RowsJob] = deque()  # jobs that may still be running, in their order
        self.inside = 0  # threads inside a C call without the lock
        self.stopped = False

    def start(self, threads: int, stage_bytes: int) -> None:
        status = self.c.storm_rows_open(threads, stage_bytes, ctypes.byref(self.pointer))
        if status != 0:
            raise SettingError(
                f"Cannot start {threads} threads to read with: {os.strerror(-status)}. "
                "Accepted: at least one, and as many as the system allows."
            )

    def stop(self) -> None:
        if os.getpid() != self.pid:  # the threads stayed with the parent
            return
        gone: deque[RowsJob] = deque()
        with self.lock:
            if not self.stopped:
                if self.pointer:
                    self.c.storm_rows_stop(self.pointer)
                self.stopped = True
                gone, self.held = self.held, gone
        gone.clear()  # after the lock: what goes with them may call anything

    def end(self) -> None:
        """For when nobody can use the pool any more: it was collected, or the interpreter exits."""
        if os.getpid() != self.pid:
            return
        self.stop()
        with self.lock:
            if self.inside == 0 and self.pointer:  # else a daemon thread waits at exit: it goes with the process
                self.c.storm_rows_free(self.pointer)
                self.pointer = ctypes.c_void_p()


class NativeRows(RowsPool):
    """The pool of csrc/rows.c."""

    def __init__(self, native: Library, threads: int, stage_bytes: int = 0) -> None:
        self.threads = threads
        self._native = _Native(native.c)
        self._load_state, self._submit = native.c.storm_load_flag, native.c.storm_rows_submit
        self._finalizer = weakref.finalize(self, self._native.end)
        self._native.start(threads, stage_bytes)

    def submit(self, pieces: Pieces, keep: object) -> RowsJob:
        native = self._native
        check_pieces(pieces)
        check_process(native.pid)
        job = RowsJob(pieces, keep)
        with native.lock:
            if native.stopped:
                raise LaneError("Cannot read with a pool that was closed. Open another one.")
            native.held.append(job)  # before the call: Ctrl-C may come right after it
            address = pieces.__array_interface__["data"][0]
            status = self._submit(native.pointer, address, len(pieces), job.outcome)
            if status != 0:
                native.held.remove(job)
                raise LaneError(f"The threads that read did not take the job: {os.strerror(-status)}.")
        self._let_go()
        return job

    def _let_go(self) -> None:
        """Let go of the memory of jobs that are over, from the oldest on; who still holds a job wants its outcome."""
        held = self._native.held
        while held and self._load_state(held[0].address) != PENDING:
            over = held[0]
            over.keep = None
            if self._load_state(over.address) == DONE:
                over.pieces = _NONE  # only a failure is looked up in them
            held.popleft()

    def state(self, job: RowsJob) -> int:
        return int(self._load_state(job.address))

    def wait(self, job: RowsJob, timeout_s: float | None = None, *, help: bool = False) -> int:
        if (state := int(self._load_state(job.address))) != PENDING:
            return state
        native = self._native
        check_process(native.pid)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with native.lock:
            if native.stopped:
                return self.state(job)
            native.inside += 1
        try:
            while True:
                left = _SLICE_S if until is None else max(0.0, until - time.monotonic())
                state = int(native.c.storm_rows_wait(native.pointer, job.outcome, min(left, _SLICE_S), help))
                if state != PENDING or (until is not None and time.monotonic() >= until):
                    return state
        finally:
            native.inside -= 1

    def cancel(self) -> None:
        native = self._native
        with native.lock:
            if native.stopped or os.getpid() != native.pid:
                return
            native.c.storm_rows_cancel(native.pointer)
            running = list(native.held)
        for job in running:
            self.wait(job)

    def close(self) -> None:
        self._native.stop()


def check_pieces(pieces: Pieces) -> None:
    """What C takes on trust."""
    assert pieces.dtype == np.int64, pieces.dtype
    assert pieces.strides == (48, 8), "six numbers each, one after the other"


def map_file(fd: int, size: int) -> int:
    """The address at which the first ``size`` bytes of a file can be copied from; 0 where that is not possible.

    What cannot be read there is no crash: the piece is read from the file then. Ends with ``unmap_file``.
    """
    native = library()
    if native is None or size == 0:
        return 0
    address = ctypes.c_void_p()
    status = native.c.storm_rows_map(fd, size, ctypes.byref(address))
    return 0 if status != 0 else address.value or 0


def unmap_file(address: int, size: int) -> None:
    """No job may use the map any more."""
    native = library()
    assert native is not None
    native.c.storm_rows_unmap(address, size)


def check_process(pid: int) -> None:
    """Threads do not follow a fork."""
    if os.getpid() != pid:
        raise LaneError(
            f"These reading threads belong to process {pid}, and did not follow the fork into {os.getpid()}. "
            "Iterate over the loader anew there."
        )


def open_rows(threads: int, *, stage_bytes: int = 0) -> RowsPool:
    """Starts the threads: native ones where the library was built, else Python's.

    ``stage_bytes``: each native thread reads files through so much memory of its own, a multiple of 4096, taken here.
    """
    native = library()
    if native is not None:
        return NativeRows(native, threads, stage_bytes)
    from .python_rows import ThreadRows  # a fallback is not worth its import elsewhere

    say_once(describe())
    return ThreadRows(threads)
