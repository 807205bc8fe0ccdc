"""Reads pieces of files, and copies pieces of memory, to their targets, on threads that never need the GIL.

A job is an array of pieces, one line of six int64 each: descriptor, source, bytes, needed, target, map (``PIECE``). A
descriptor below 0 means that the source is an address. A target of 0 means that the bytes are only brought into the
page cache. ``needed``: how many of the bytes must be there where the file ends. ``map``: the result of ``map_file``, or
0. See csrc/rows.c.

A job's memory and descriptors belong to the pool until the job is over. If the caller drops a job or is interrupted,
the pool keeps them, and releases them when no thread can touch them any more.
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

from ...core.errors import LaneError, SettingError
from ...core.notices import say_once
from ..library import Library, RowsOutcome, describe, library

PIECE = ("fd", "source", "bytes", "needed", "target", "map")
PENDING, DONE, FAILED, DROPPED = range(4)
Pieces = NDArray[np.int64]
_NONE: Pieces = np.empty((0, len(PIECE)), dtype=np.int64)
_SLICE_S = 0.1  # longest time inside C per call, so that Ctrl-C is noticed


@dataclass(frozen=True, slots=True)
class Failure:
    """The piece that ended a job: its index, the errno (ENODATA: the file ended), and the bytes that were there."""

    piece: int
    error: int
    got: int


class RowsJob:
    """One job. ``keep`` is kept alive until it is over."""

    __slots__ = ("address", "keep", "outcome", "pieces")

    def __init__(self, pieces: Pieces, keep: object) -> None:
        self.pieces, self.keep = pieces, keep
        # The pool sets PENDING when it takes the job: one that an interrupt kept from its pool must not be waited for.
        self.outcome = RowsOutcome(state=DROPPED)
        self.address = ctypes.addressof(self.outcome)

    def failure(self) -> Failure:
        """The failure of a failed job; of pieces that were read together, the piece in which the bytes ended."""
        piece, got = int(self.outcome.piece), int(self.outcome.got)
        sizes: Any = self.pieces[:, 2]
        while piece + 1 < len(sizes) and got >= sizes[piece] > 0:
            got -= int(sizes[piece])
            piece += 1
        return Failure(piece, int(self.outcome.error), got)


class RowsPool(abc.ABC):
    """Takes jobs and works on them in order of arrival. For one thread at a time, except ``close``."""

    threads: int

    @abc.abstractmethod
    def submit(self, pieces: Pieces, keep: object) -> RowsJob:
        """Queue a job; returns at once. ``pieces``: a contiguous array ``(n, 6)``, not to be changed afterwards."""

    @abc.abstractmethod
    def state(self, job: RowsJob) -> int:
        """PENDING, DONE, FAILED or DROPPED. Does not block. The data of a job that is DONE is visible then."""

    @abc.abstractmethod
    def wait(self, job: RowsJob, timeout_s: float | None = None, *, help: bool = False) -> int:
        """Block until the job is over or the time has passed; returns its state. Ctrl-C gets through.

        With ``help`` this thread works on the queue until no piece of the job is left to take.
        """

    @abc.abstractmethod
    def cancel(self) -> None:
        """Drop pieces that no thread has begun, and block until all jobs are over: then nothing is read or written."""

    @abc.abstractmethod
    def close(self) -> None:
        """Drop pieces that no thread has begun, wait for the rest, end the threads. Safe twice, and after a fork."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Native:
    """The C object and what its jobs need. Separate from the pool, so that it can outlive it for its own ending.

    Made without threads: the finalizer that ends them must exist before they start, as Ctrl-C may come right after.
    """

    def __init__(self, c: ctypes.CDLL) -> None:
        self.c, self.pid, self.lock = c, os.getpid(), threading.RLock()
        self.pointer = ctypes.c_void_p()
        self.held: deque[RowsJob] = deque()  # jobs that may still be running, in order
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
        if os.getpid() != self.pid:  # the threads remained in the parent
            return
        gone: deque[RowsJob] = deque()
        with self.lock:
            if not self.stopped:
                if self.pointer:
                    self.c.storm_rows_stop(self.pointer)
                self.stopped = True
                gone, self.held = self.held, gone
        gone.clear()  # after the lock: finalizers of what they held may call anything

    def end(self) -> None:
        """End the threads when the pool was collected, or the interpreter exits."""
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
        """Release the memory of finished jobs, from the oldest on; the job itself keeps its outcome for its holder."""
        held = self._native.held
        while held and self._load_state(held[0].address) != PENDING:
            over = held[0]
            over.keep = None
            if self._load_state(over.address) == DONE:
                over.pieces = _NONE  # they are read only after a failure
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
    """Assert what C does not check."""
    assert pieces.dtype == np.int64, pieces.dtype
    assert pieces.strides == (48, 8), "six numbers each, one after the other"


def map_file(fd: int, size: int) -> int:
    """Map the first ``size`` bytes of a file, to copy from; returns the address, or 0 if that is not possible.

    An unreadable page does not crash: the piece is then read from the file. End it with ``unmap_file``.
    """
    native = library()
    if native is None or size == 0:
        return 0
    address = ctypes.c_void_p()
    status = native.c.storm_rows_map(fd, size, ctypes.byref(address))
    return 0 if status != 0 else address.value or 0


def unmap_file(address: int, size: int) -> None:
    """Unmap it. No job may use the map any more."""
    native = library()
    assert native is not None
    native.c.storm_rows_unmap(address, size)


def check_process(pid: int) -> None:
    """Raise after a fork, which copies no threads."""
    if os.getpid() != pid:
        raise LaneError(
            f"These reading threads belong to process {pid}, and do not exist after the fork into {os.getpid()}. "
            "Iterate over the loader again there."
        )


def open_rows(threads: int, *, stage_bytes: int = 0) -> RowsPool:
    """Start the threads: native ones if the library was built, else Python's.

    ``stage_bytes``: memory of each native thread through which it reads files, a multiple of 4096, allocated here.
    """
    native = library()
    if native is not None:
        return NativeRows(native, threads, stage_bytes)
    from .python_rows import ThreadRows  # imported only where the fallback is needed

    say_once(describe())
    return ThreadRows(threads)
