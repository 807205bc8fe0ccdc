"""Brings data into the page cache, in the order of its first use, at the rate of large reads.

Random rows of files that are not cached yet would be read a few KiB at a time. So during the first epoch, a thread goes
through its windows and makes the kernel read their blocks. Blocks that are cached already cost almost nothing. The
data fits in RAM, or it would not be read this way, so there is no limit on how far the thread is ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

import numpy as np

from ...native.rows.jobs import PENDING, PIECE, Pieces, RowsJob
from ...native.rows.open import open_rows
from .descriptors import Descriptors
from .layout import Layout
from .order import Order, Window

_JOBS = 2  # windows queued at a time, so that the thread is never idle


def warm(layout: Layout, order: Order, descriptors: Descriptors, epoch: int, first: int) -> Generator[None, None, None]:
    """Start a thread with the window of place ``first`` of ``epoch``. The generator ends when it has read all.

    Each ``next`` queues windows if the thread has few left, without blocking. ``close`` waits for one block at most."""
    jobs: deque[RowsJob] = deque()
    with open_rows(1) as pool:
        for window in order.windows_from(epoch, first):
            while len(jobs) == _JOBS:
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
