"""The places of a ``FileSource``'s rows as arrays, for a batch of row numbers at once, without a loop over rows."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.errors import StorageError
from ...memory.disk.calls import storage_error
from ..source import FileSource
from .permutations import Rows


@dataclass(frozen=True, slots=True)
class Column:
    """One field: for each shard the number of its file, the offset of its first row, and the stride."""

    row_bytes: int
    files: Rows
    offsets: Rows
    strides: Rows


class Layout:
    """``files``: all files of the source, by number; ``columns``: its fields."""

    def __init__(self, source: FileSource) -> None:
        self.source = source
        numbers: dict[Path, int] = {}
        self.columns = [
            Column(
                field.row_bytes,
                _array(numbers.setdefault(shard.strips[at].path, len(numbers)) for shard in source.shards),
                _array(shard.strips[at].offset for shard in source.shards),
                _array(shard.strips[at].stride for shard in source.shards),
            )
            for at, field in enumerate(source.fields)
        ]
        self.files = list(numbers)
        self.ends = np.cumsum(_array(shard.rows for shard in source.shards))
        self.starts = self.ends - _array(shard.rows for shard in source.shards)

    def file_ends(self) -> list[int]:
        """For each file, the end of its last row."""
        ends = np.zeros(len(self.files), dtype=np.int64)
        for column in self.columns:
            last = column.offsets + (self.ends - self.starts - 1) * column.strides + column.row_bytes
            np.maximum.at(ends, column.files, last)
        found: list[int] = ends.tolist()
        return found

    def shards_of(self, rows: Rows) -> Rows:
        """The shard of each row."""
        return np.searchsorted(self.ends, rows, side="right")

    def place_of(self, row: int, field: int) -> tuple[Path, int, int]:
        """The file of a row, its number in its shard, and where its bytes end in the file."""
        shard = int(np.searchsorted(self.ends, row, side="right"))
        column, inside = self.columns[field], row - int(self.starts[shard])
        begin = int(column.offsets[shard]) + inside * int(column.strides[shard])
        return self.files[int(column.files[shard])], inside, begin + column.row_bytes

    def open_error(self, rows: Rows, file: int, cause: OSError) -> StorageError:
        """The error for a file that cannot be opened, with the first of ``rows`` that lies in it."""
        shards = self.shards_of(rows)
        for number, column in enumerate(self.columns):
            inside = np.flatnonzero(column.files[shards] == file)
            if len(inside):
                row = int(rows[inside[0]])
                return storage_error(f"read {self.describe(row, number)}", cause)
        raise AssertionError("none of the rows lies in the file")

    def describe(self, row: int, field: int) -> str:
        """A row for errors: its file and its number."""
        path, inside, _ = self.place_of(row, field)
        return f"row {inside} of {path} (row {row} of {self.source.name})"

    def read_error(self, row: int, field: int, code: int) -> StorageError:
        """The error for a failed read of one row, with the file, the row and the file's present size."""
        path, _, end = self.place_of(row, field)
        what = f"read {self.describe(row, field)}"
        try:
            size = path.stat().st_size
        except OSError as error:
            return storage_error(what, error)
        if size < end or code == errno.ENODATA:
            short = StorageError(
                f"Cannot {what}: it ends at byte {end}, but the file has {size} bytes now. It was truncated after it "
                "was opened. Restore it, or make a new loader."
            )
            short.errno = errno.ENODATA
            return short
        return storage_error(what, OSError(code, os.strerror(code)))


def _array(values: object) -> Rows:
    return np.fromiter(values, dtype=np.int64)  # type: ignore[call-overload, no-any-return]
