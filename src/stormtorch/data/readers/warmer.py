"""Brings data into the page cache, in the order of its first use, at the rate of large reads.

Random rows of files that are not cached yet would be read a few KiB at a time. So during the first epoch, a thread goes
through its windows and makes the kernel read their blocks. Blocks that are cached already cost almost nothing. The
data fits in RAM, or it would not be read this way, so there is no limit on how far the thread is ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from ...native.rows.jobs import PENDING, PIECE, RowsJob, RowsPool
from ...native.rows.open import open_rows
from .descriptors import Descriptors
from .layout import Layout
from .order import Order, Window

_JOBS = 2  # windows queued at a time, so that the thread is never idle


class Warmer:
    """Call ``step`` now and then; ends by itself."""

    def __init__(self, layout: Layout, order: Order, descriptors: Descriptors, epoch: int, first: int) -> None:
        """Start with the window of place ``first`` of ``epoch``."""
        self._layout, self._descriptors = layout, descriptors
        self._windows: Iterator[Window] = order.windows_from(epoch, first)
        self._jobs: deque[RowsJob] = deque()
        self._pool: RowsPool | None = open_rows(1)

    def step(self) -> None:
        """Queue the next windows, if the thread has few left. Does not block."""
        while self._pool is not None:
            while self._jobs and self._pool.state(self._jobs[0]) != PENDING:
                self._jobs.popleft()
            if len(self._jobs) >= _JOBS:
                return
            window = next(self._windows, None)
            if window is not None:
                self._queue(window)
            elif not self._jobs:
                self.close()
            else:
                return

    @property
    def ended(self) -> bool:
        """Whether it has finished, or was closed."""
        return self._pool is None

    def close(self) -> None:
        """Cancel the rest. Blocks for the current block at most."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        self._jobs.clear()

    def _queue(self, window: Window) -> None:
        layout = self._layout
        shards = layout.shards_of(window.firsts)
        pieces = np.zeros((len(layout.columns) * len(shards), len(PIECE)), dtype=np.int64)
        for lines, column in zip(np.split(pieces, len(layout.columns)), layout.columns, strict=True):
            self._descriptors.open(column.files[shards])  # what it cannot open, the read that needs the file reports
            lines[:, 0] = self._descriptors.fds[column.files[shards]]
            lines[:, 1] = layout.begins(window.firsts, shards, column)
            lines[:, 2] = lines[:, 3] = (window.counts - 1) * column.strides[shards] + column.row_bytes
        assert self._pool is not None
        self._jobs.append(self._pool.submit(pieces, None))
