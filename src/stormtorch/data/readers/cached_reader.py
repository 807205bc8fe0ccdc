"""Data that fits in RAM: copies each row once, from the page cache straight to its place in the batch.

Files are mapped, and the copy is guarded (see csrc/rows.c): a file that shrinks gives an error, not a crash.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from ...native.rows.jobs import DONE, FAILED, PIECE, Pieces, RowsJob, RowsPool
from ...native.rows.open import open_rows
from ..source import FileSource
from .descriptors import Descriptors
from .layout import Layout
from .order import Order
from .permutations import Rows
from .reader import Read, Reader
from .warmer import warm


class CachedRead(Read):
    def __init__(self, reader: CachedReader, rows: Rows, job: RowsJob) -> None:
        self.rows, self._reader, self._job = rows, reader, job

    def ready(self) -> bool:
        return self._reader.pool.state(self._job) == DONE

    def wait(self) -> None:
        reader = self._reader
        state = reader.pool.wait(self._job, help=True)
        if state == FAILED:
            failure = self._job.failure()
            field, at = divmod(failure.piece, len(self.rows))
            raise reader.layout.read_error(int(self.rows[at]), field, failure.error, reader.descriptors.errors)
        assert state == DONE, "waited for a cancelled read"


class CachedReader(Reader):
    """Reads rows of ``source`` from the page cache."""

    def __init__(self, source: FileSource, order: Order, *, threads: int) -> None:
        self._order = order
        self.layout = Layout(source)
        self.descriptors = Descriptors(self.layout.files, direct=False, mapped_bytes=self.layout.file_ends())
        self.pool: RowsPool = open_rows(threads)
        self._only_shard = np.zeros(1, dtype=np.int64) if len(source.shards) == 1 else None  # of all rows
        self._warmer: Generator[None, None, None] | None = None
        self._is_warm = False  # the whole epoch is cached
        self._templates: list[Pieces] = []  # see _template

    def stop(self) -> None:
        if self._warmer is not None:
            self._warmer.close()
            self._warmer = None
        self.pool.cancel()

    def restart(self, epoch: int, first: int) -> None:
        self.stop()
        if not self._is_warm:
            self._warmer = warm(self.layout, self._order, self.descriptors, epoch, first)

    def start(self, epoch: int, first: int, count: int, targets: Sequence[int], keep: object) -> Read:
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
        if self._warmer is not None:
            self._warmer.close()
        self.pool.close()
        self.descriptors.close()
