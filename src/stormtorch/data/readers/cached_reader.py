"""Data that fits in RAM: copies each row once, from the page cache straight to its place in the batch.

Files are mapped, and the copy is guarded (see csrc/rows.c): a file that shrinks gives an error, not a crash.

Random rows of files that are not cached yet would be read a few KiB at a time. So during the first epoch, a thread goes
through its windows and makes the kernel read their blocks, in the order of their first use, at the rate of large reads.
Blocks that are cached already cost almost nothing. The data fits in RAM, or it would not be read this way, so there is
no limit on how far the thread is ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence

import numpy as np

from ...native.rows.jobs import DONE, FAILED, PENDING, PIECE, Pieces, RowsJob, RowsPool
from ...native.rows.open import open_rows
from ..source import FileSource
from .descriptors import Descriptors
from .layout import Layout
from .order import Order, Window
from .permutations import Rows

Warmer = Generator[None, None, None]
_WARM_JOBS = 2  # windows queued at a time, so that the thread is never idle


class CachedRead:
    """A group of batches that is being read into host memory."""

    def __init__(self, reader: CachedReader, rows: Rows, job: RowsJob) -> None:
        self._rows, self._reader, self._job = rows, reader, job

    def ready(self) -> bool:
        """Whether it is complete. Does not block."""
        return self._reader.pool.state(self._job) == DONE

    def wait(self) -> None:
        """Block until it is complete. Raises StormError, with the file and the row, if it failed."""
        reader = self._reader
        state = reader.pool.wait(self._job, help=True)
        if state == FAILED:
            failure = self._job.failure()
            field, at = divmod(failure.piece, len(self._rows))
            reader.layout.raise_error(int(self._rows[at]), field, failure.error, reader.descriptors.errors)
        assert state == DONE, "waited for a cancelled read"


class CachedReader:
    """Reads batches of ``source`` from the page cache, in the order of the epochs. For one thread at a time."""

    refused = None  # as WindowReader's

    def __init__(self, source: FileSource, order: Order, *, threads: int) -> None:
        self._order = order
        self.layout = Layout(source)
        self.descriptors = Descriptors(self.layout.files, direct=False, mapped_bytes=self.layout.file_ends())
        self.pool: RowsPool = open_rows(threads)
        self._only_shard = np.zeros(1, dtype=np.int64) if len(source.shards) == 1 else None  # of all rows
        self._warmer: Warmer | None = None
        self._is_warm = False  # the whole epoch is cached
        self._templates: list[Pieces] = []  # see _template

    def stop(self) -> None:
        """Cancel all reads. When it returns, nothing writes to their targets any more."""
        if self._warmer is not None:
            self._warmer.close()
            self._warmer = None
        self.pool.cancel()

    def restart(self, epoch: int, first: int) -> None:
        """``stop``, then expect the next read to be at place ``first`` of ``epoch``."""
        self.stop()
        if not self._is_warm:
            self._warmer = _warm(self.layout, self._order, self.descriptors, epoch, first)

    def start(self, epoch: int, first: int, count: int, targets: Sequence[int], keep: object) -> CachedRead:
        """Start to read the rows at places ``first`` to ``first + count``. Reads come in the order of the epochs.

        ``targets``: an address for each field, where the rows go one after another. ``keep``: an object that keeps this
        memory alive.
        """
        rows = self._order.rows(epoch, first, count)
        if self._warmer is not None and next(self._warmer, True):
            self._warmer, self._is_warm = None, True
        shards = self.layout.shards_of(rows) if self._only_shard is None else self._only_shard
        pieces = self._template(count)
        for at, (column, target) in enumerate(zip(self.layout.columns, targets, strict=True)):
            part, files = pieces[at * count : (at + 1) * count], column.files[shards]
            self.descriptors.open(files)
            part[:, 0], part[:, 5] = self.descriptors.fds[files], self.descriptors.maps[files]
            part[:, 1] = self.layout.begins(rows, shards, column)
            part[:, 4] += target
        return CachedRead(self, rows, self.pool.submit(pieces, keep))

    def _template(self, count: int) -> Pieces:
        """A template for the pieces of ``count`` rows: their sizes, and places in the batch."""
        if not self._templates or len(self._templates[0]) < count:
            self._templates = []
            for column in self.layout.columns:
                blank = np.zeros((count, len(PIECE)), dtype=np.int64)
                blank[:, 2] = blank[:, 3] = column.row_bytes
                blank[:, 4] = np.arange(count) * column.row_bytes
                self._templates.append(blank)
        return np.concatenate([blank[:count] for blank in self._templates])

    def close(self) -> None:
        """Cancel all reads, end the threads, return the memory. Idempotent."""
        if self._warmer is not None:
            self._warmer.close()
        self.pool.close()
        self.descriptors.close()


def _warm(layout: Layout, order: Order, descriptors: Descriptors, epoch: int, first: int) -> Warmer:
    """Start a thread with the window of place ``first`` of ``epoch``. The generator ends when it has read all.

    Each ``next`` queues windows if the thread has few left, without blocking. ``close`` waits for one block at most."""
    jobs: deque[RowsJob] = deque()
    with open_rows(1) as pool:
        for window in order.windows_from(epoch, first):
            while len(jobs) == _WARM_JOBS:
                if pool.state(jobs[0]) == PENDING:
                    yield
                else:
                    jobs.popleft()
            jobs.append(pool.submit(_pieces(layout, descriptors, window), None))
        while pool.state(jobs[-1]) == PENDING:
            yield


def _pieces(layout: Layout, descriptors: Descriptors, window: Window) -> Pieces:
    shards = layout.shards_of(window.firsts)
    pieces = np.zeros((len(layout.columns) * len(shards), len(PIECE)), dtype=np.int64)
    for lines, column in zip(np.split(pieces, len(layout.columns)), layout.columns, strict=True):
        descriptors.open(column.files[shards])  # what it cannot open, the read that needs the file reports
        lines[:, 0] = descriptors.fds[column.files[shards]]
        lines[:, 1] = layout.begins(window.firsts, shards, column)
        lines[:, 2] = lines[:, 3] = (window.counts - 1) * column.strides[shards] + column.row_bytes
    return pieces
