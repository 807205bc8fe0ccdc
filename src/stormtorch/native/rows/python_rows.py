"""The pool of rows without the C library: the same interface, but `start` does the whole job, without threads."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time

from ...core.errors import LaneError
from ...core.sizes import round_down
from .jobs import DONE, FAILED, PENDING, Move, RowsJob, RowsPool, check_process

_STALLS = 8  # as in csrc/rows.c


def _read(fd: int, view: memoryview, offset: int) -> int:
    return os.preadv(fd, [view], offset)


def _write(fd: int, view: memoryview, offset: int) -> int:
    return os.pwritev(fd, [view], offset)


def _move(job: RowsJob, move: Move) -> tuple[int, int, int] | None:
    """Move the pieces; returns (piece, errno, bytes) of the first that failed, or None."""
    for index, (fd, source, size, needed, target, _) in enumerate(job.pieces.tolist()):
        if fd < 0:
            ctypes.memmove(target, source, size)
        elif not target:
            with contextlib.suppress(OSError):  # only a hint
                os.posix_fadvise(fd, source, size, os.POSIX_FADV_WILLNEED)
        elif size:
            view = memoryview((ctypes.c_ubyte * size).from_address(target)).cast("B")
            got = stalls = 0
            while got < needed:
                at = round_down(got, job.unit)
                try:
                    more = move(fd, view[at:], source + at)
                except OSError as error:
                    return index, error.errno or errno.EIO, got
                got, stalls = max(got, at + more), 0 if at + more > got else stalls + 1
                if not more or stalls == _STALLS:
                    return index, errno.ENODATA, got
    return None


class CallerRows(RowsPool):
    """Moves and copies on the calling thread. Ctrl-C in `start` ends the job: nothing reads or writes after it."""

    def __init__(self, threads: int, read: Move | None = None, write: Move | None = None) -> None:
        self.threads = threads
        self._read, self._write = read or _read, write or _write
        self._pid, self._closed = os.getpid(), False

    def start(self, job: RowsJob) -> None:
        check_process(self._pid)
        if self._closed:
            raise LaneError("Cannot read with a pool that was closed. Open another one.")
        outcome = job.outcome
        outcome.begin_ns = time.monotonic_ns()
        failure = _move(job, self._write if job.write else self._read)
        if failure is not None:
            outcome.piece, outcome.error, outcome.got = failure
        outcome.end_ns = time.monotonic_ns()
        outcome.state = DONE if failure is None else FAILED
        job.let_go()

    def state(self, job: RowsJob) -> int:
        return int(job.outcome.state)

    def wait(self, job: RowsJob, *, help: bool = False) -> int:  # noqa: ARG002
        assert job.outcome.state != PENDING
        return self.state(job)

    def drop(self, job: RowsJob | None = None) -> None:
        """All jobs are over."""

    def finish(self) -> None:
        """All jobs are over."""

    def close(self) -> None:
        self._closed = True
