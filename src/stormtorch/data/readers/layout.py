"""The places of a ``FileSource``'s rows as arrays, for a batch of row numbers at once, without a loop over rows."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from ...core.errors import StorageError
from ...memory.disk.calls import storage_errors
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
        self.ends: Rows = np.cumsum(_array(shard.rows for shard in source.shards))
        self.starts: Rows = self.ends - _array(shard.rows for shard in source.shards)

    def file_ends(self) -> list[int]:
        """For each file, the end of its last row."""
        ends = np.zeros(len(self.files), dtype=np.int64)
        for column in self.columns:
            last = column.offsets + (self.ends - self.starts - 1) * column.strides + column.row_bytes
            np.maximum.at(ends, column.files, last)
        found: list[int] = ends.tolist()
        return found

    def shards_of(self, rows: Rows) -> Rows:
        return np.searchsorted(self.ends, rows, side="right")

    def begins(self, rows: Rows, shards: Rows, column: Column) -> Rows:
        """The offset of one field of each row in its file."""
        return column.offsets[shards] + (rows - self.starts[shards]) * column.strides[shards]

    def place_of(self, row: int, field: int) -> tuple[int, int, int]:
        """The number of a row's file, the row's number in its shard, and where its bytes end in the file."""
        rows, column = np.asarray([row]), self.columns[field]
        shards = self.shards_of(rows)
        end = int(self.begins(rows, shards, column)[0]) + column.row_bytes
        return int(column.files[shards[0]]), row - int(self.starts[shards[0]]), end

    def describe(self, row: int, field: int) -> str:
        """A row for errors: its file and its number."""
        file, inside, _ = self.place_of(row, field)
        return f"row {inside} of {self.files[file]} (row {row} of {self.source.name})"

    def raise_error(self, row: int, field: int, code: int, unopened: Mapping[int, OSError]) -> NoReturn:
        """Raise the error for a failed read of one row, with the file, the row and the file's present size.

        ``unopened``: the files that could not be opened, by number.
        """
        file, _, end = self.place_of(row, field)
        what = f"read {self.describe(row, field)}"
        with storage_errors(what):
            if file in unopened:
                raise unopened[file]
            size = self.files[file].stat().st_size
            if size >= end and code != errno.ENODATA:
                raise OSError(code, os.strerror(code))
        short = StorageError(
            f"Cannot {what}: it ends at byte {end}, but the file has {size} bytes now. It was truncated after it was "
            "opened. Restore it, or make a new loader."
        )
        short.errno = errno.ENODATA
        raise short


def _array(values: object) -> Rows:
    return np.fromiter(values, dtype=np.int64)  # type: ignore[call-overload, no-any-return]
