"""Threads that move pieces between files and memory, and copy memory, without the GIL.

A job is an array of pieces, one line of six int64 each: descriptor, source, bytes, needed, target, map (``PIECE``). A
descriptor below 0 means that the source is an address. A target of 0 means that the bytes are only brought into the
page cache. ``needed``: how many of the bytes must be there where the file ends. ``map``: the result of ``map_file``, or
0. A job that writes moves the bytes at ``target`` to the offset ``source``. See csrc/rows.c.

A job's memory and descriptors belong to the pool until the job is over. If the caller drops a job or is interrupted,
the pool keeps them, and releases them when no thread can touch them any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.endings import Closing
from ...core.errors import LaneError
from ..library import RowsOutcome
from ..moves import Move, memory_at, move_all, read_at, write_at

PIECE = ("fd", "source", "bytes", "needed", "target", "map")
PENDING, DONE, FAILED, DROPPED = range(4)
Pieces = NDArray[np.int64]
NO_PIECES: Pieces = np.empty((0, len(PIECE)), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Failure:
    """The piece that ended a job: its index, the errno (ENODATA: no call moves more), and the bytes that were moved."""

    piece: int
    error: int
    got: int


class RowsJob:
    """One job. ``pieces``: a contiguous array ``(n, 6)``, not to be changed. ``keep`` lives until the job is over.

    ``unit``: after a short count, offsets are multiples of it, as direct I/O needs.
    """

    __slots__ = ("address", "keep", "outcome", "pieces", "unit", "write")

    def __init__(self, pieces: Pieces, keep: object, *, write: bool = False, unit: int = 1) -> None:
        assert pieces.dtype == np.int64, pieces.dtype  # C does not check
        assert pieces.strides == (48, 8), "six numbers each, one after the other"
        self.pieces, self.keep, self.write, self.unit = pieces, keep, write, unit
        # The pool sets PENDING when it takes the job: one that an interrupt kept from its pool must not be waited for.
        self.outcome = RowsOutcome(state=DROPPED)
        self.address = ctypes.addressof(self.outcome)

    def failure(self) -> Failure:
        """The failure of a failed job; of pieces that were moved together, the piece in which the bytes ended."""
        piece, got = int(self.outcome.piece), int(self.outcome.got)
        sizes: Any = self.pieces[:, 2]
        while piece + 1 < len(sizes) and got >= sizes[piece] > 0:
            got -= int(sizes[piece])
            piece += 1
        return Failure(piece, int(self.outcome.error), got)

    def let_go(self) -> None:
        """Release what the job kept alive, once it is over. Its pieces are read only after a failure."""
        self.keep = None
        if self.outcome.state == DONE:
            self.pieces = NO_PIECES


class RowsPool(Closing):
    """Takes jobs and works on them in order of arrival. One thread at a time starts jobs; any thread may wait.

    This one, for machines without the C library, does a job inside ``start``, on the calling thread. Ctrl-C there ends
    the job: nothing reads or writes after it.
    """

    def __init__(self, threads: int, *, read: Move = read_at, write: Move = write_at) -> None:
        """``read``, ``write``: a test puts others here, to make a disk fail."""
        self.threads, self._read, self._write = threads, read, write
        self._pid, self._closed = os.getpid(), False

    def submit(self, pieces: Pieces, keep: object) -> RowsJob:
        """`start` a job that reads or copies."""
        job = RowsJob(pieces, keep)
        self.start(job)
        return job

    def start(self, job: RowsJob) -> None:
        """Queue a job; returns at once, except without the C library."""
        check_process(self._pid)
        if self._closed:
            raise closed()
        outcome = job.outcome
        outcome.begin_ns = time.monotonic_ns()
        failure = _move(job, self._write if job.write else self._read)
        if failure is not None:
            outcome.piece, outcome.error, outcome.got = failure
        outcome.end_ns = time.monotonic_ns()
        outcome.state = DONE if failure is None else FAILED
        job.let_go()

    def state(self, job: RowsJob) -> int:
        """PENDING, DONE, FAILED or DROPPED. Does not block. The data of a job that is DONE is visible then."""
        return int(job.outcome.state)

    def wait(self, job: RowsJob, *, help: bool = False) -> int:  # noqa: ARG002
        """Block until the job is over; returns its state. Ctrl-C gets through.

        With ``help`` this thread works on the queue until no piece of the job is left to take.
        """
        return self.state(job)

    def drop(self, job: RowsJob | None = None) -> None:
        """Drop pieces of the job, or of all jobs, that no thread has begun. Does not wait for the others."""

    def finish(self) -> None:
        """Block until all jobs are over: then nothing is read or written. Ctrl-C gets through."""

    def cancel(self) -> None:
        """`drop` and `finish`."""
        self.drop()
        self.finish()

    def close(self) -> None:
        """Drop pieces that no thread has begun, wait for the rest, end the threads. Safe twice, and after a fork."""
        self._closed = True


def _move(job: RowsJob, move: Move) -> tuple[int, int, int] | None:
    """Move the pieces; returns (piece, errno, bytes) of the first that failed, or None."""
    for index, (fd, source, size, needed, target, _) in enumerate(job.pieces.tolist()):
        if fd < 0:
            ctypes.memmove(target, source, size)
        elif not target:
            with contextlib.suppress(OSError):  # only a hint
                os.posix_fadvise(fd, source, size, os.POSIX_FADV_WILLNEED)
        elif size:
            error, got = move_all(move, fd, memory_at(target, size), source, needed=needed, unit=job.unit)
            if error:
                return index, error, got
    return None


def closed() -> LaneError:
    """The error of a pool that takes no jobs any more."""
    return LaneError("Cannot read with a pool that was closed. Open another one.")


def check_process(pid: int) -> None:
    """Raise after a fork, which copies no threads."""
    if os.getpid() != pid:
        raise LaneError(
            f"These reading threads belong to process {pid}, and do not exist after the fork into {os.getpid()}. "
            "Iterate over the loader again there."
        )
