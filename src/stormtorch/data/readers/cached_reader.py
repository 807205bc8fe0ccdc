"""Data that fits in RAM: copies each row once, from the page cache straight to its place in the batch.

Files are mapped, and the copy is guarded (see csrc/rows.c): a file that shrinks gives an error, not a crash.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...native.rows.jobs import DONE, FAILED, PIECE, Pieces, RowsJob, RowsPool
from ...native.rows.open import open_rows
from ..source import FileSource
from .descriptors import CannotOpen, Descriptors
from .layout import Layout
from .order import Order
from .permutations import Rows
from .reader import FailedRead, Read, Reader
from .warmer import Warmer


class CachedRead(Read):
    def __init__(self, reader: CachedReader, rows: Rows, job: RowsJob, files: Sequence[int]) -> None:
        self.rows = rows
        self._reader, self._job, self._files = reader, job, files

    def ready(self) -> bool:
        return self._reader.pool.state(self._job) == DONE

    def wait(self) -> None:
        state = self._reader.pool.wait(self._job, help=True)
        files, self._files = self._files, ()
        self._reader.descriptors.give_back(files)
        if state == FAILED:
            failure = self._job.failure()
            field, at = divmod(failure.piece, len(self.rows))
            raise self._reader.layout.read_error(int(self.rows[at]), field, failure.error)
        assert state == DONE, "waited for a cancelled read"


class CachedReader(Reader):
    """Reads rows of ``source`` from the page cache."""

    mode = "cached"

    def __init__(self, source: FileSource, order: Order, *, threads: int, reason: str) -> None:
        self.reason, self._order = reason, order
        self.layout = Layout(source)
        self.descriptors = Descriptors(self.layout.files, direct=False, mapped_bytes=self.layout.file_ends())
        self.pool: RowsPool = open_rows(threads)
        self._one_shard = len(source.shards) == 1
        self._warmer: Warmer | None = None
        self._all_files = list(range(len(self.layout.files)))
        self._templates: list[Pieces] = []  # see _template

    def stop(self) -> None:
        if self._warmer is not None and not self._warmer.ended:
            self._warmer.close()
            self._warmer = None  # ``restart`` makes another
        self.pool.cancel()
        self.descriptors.give_back_all()

    def restart(self, epoch: int, first: int) -> None:
        self.stop()
        if self._warmer is None:  # a finished one remains: the data is cached
            self._warmer = Warmer(self.layout, self._order, self.descriptors, epoch, first)

    def start(self, epoch: int, first: int, count: int, targets: Sequence[int], keep: object) -> Read | None:
        rows = self._order.rows(epoch, first, count)
        assert self._warmer is not None
        self._warmer.step()
        layout = self.layout
        shards = None if self._one_shard else layout.shards_of(rows)
        files = self._files_of(shards)
        try:
            lent = self.descriptors.lend(files)
            if lent is None and 2 * len(files) > self.descriptors.limit:
                self._warmer.close()  # it may hold up to half of the descriptors
                lent = self.descriptors.lend(files)
        except CannotOpen as error:
            return FailedRead(rows, self.layout.open_error(rows, error.file, error.cause))
        if lent is None:
            return None
        pieces = self._template(count)
        for at, (column, target) in enumerate(zip(layout.columns, targets, strict=True)):
            part = pieces[at * count : (at + 1) * count]
            if shards is None:
                file = lent[column.files[0]]
                part[:, 0], part[:, 5] = file.fd, file.map
                part[:, 1] = rows * column.strides[0]
                part[:, 1] += column.offsets[0]
            else:
                which = np.searchsorted(files, column.files[shards])
                part[:, 0] = np.asarray([file.fd for file in lent])[which]
                part[:, 5] = np.asarray([file.map for file in lent])[which]
                part[:, 1] = column.offsets[shards] + (rows - layout.starts[shards]) * column.strides[shards]
            part[:, 4] += target
        return CachedRead(self, rows, self.pool.submit(pieces, keep), files)

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

    def _files_of(self, shards: Rows | None) -> list[int]:
        """The files of these shards, sorted."""
        if shards is None:
            return self._all_files
        used = np.unique(shards)
        files: list[int] = np.unique(np.concatenate([column.files[used] for column in self.layout.columns])).tolist()
        return files

    def close(self) -> None:
        if self._warmer is not None:
            self._warmer.close()
        self.pool.close()
        self.descriptors.close()
