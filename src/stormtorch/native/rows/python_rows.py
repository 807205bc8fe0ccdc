"""The pool of rows without the C library: the same interface, but each job is done inside `submit`, without threads."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

from ...core.errors import LaneError
from .jobs import DONE, FAILED, PENDING, Pieces, RowsJob, RowsPool, check_pieces, check_process


def _move(pieces: Pieces) -> tuple[int, int, int] | None:
    """Move the pieces; returns (piece, errno, bytes) of the first that failed, or None."""
    for index, (fd, source, size, needed, target, _) in enumerate(pieces.tolist()):
        if fd < 0:
            ctypes.memmove(target, source, size)
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


class CallerRows(RowsPool):
    """Reads and copies on the calling thread. Ctrl-C in `submit` ends the job: nothing reads or writes after it."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pid, self._closed = os.getpid(), False

    def submit(self, pieces: Pieces, keep: object) -> RowsJob:
        check_pieces(pieces)
        check_process(self._pid)
        if self._closed:
            raise LaneError("Cannot read with a pool that was closed. Open another one.")
        job = RowsJob(pieces, keep)
        failure = _move(pieces)
        if failure is not None:
            job.outcome.piece, job.outcome.error, job.outcome.got = failure
        job.outcome.state = DONE if failure is None else FAILED
        job.keep = None
        return job

    def state(self, job: RowsJob) -> int:
        return int(job.outcome.state)

    def wait(self, job: RowsJob, *, help: bool = False) -> int:  # noqa: ARG002
        assert job.outcome.state != PENDING
        return self.state(job)

    def cancel(self) -> None:
        """All jobs are over."""

    def close(self) -> None:
        self._closed = True
