"""Arrow: IPC files and streams, and tables in RAM. A column whose rows all have the same number of bytes is a field.

Accepted: integers, floats, and (nested) lists of them in which every row has the same length, of a fixed-size type or
not. Nulls are refused: a tensor cannot hold them.

A record batch stores each column contiguously, so a column of fixed width is a strip of the file. `arrow_source` maps
the file, takes the address of the column's numbers from pyarrow, and subtracts the mapping's address: that is the
offset in the file. Then it drops the mapping; the loader reads the file itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ....core.errors import SettingError, StorageError
from ...source import DecodedSource, Field, FileSource, Strip
from ..columns import cut_together, selected
from ..dtypes import from_numpy, name_of
from ..paths import file_size, read_at

_GROUP_ROWS = 4096
_PACK = "Leave it out (open_source(..., columns=[...])), or make rows or tokens of it with `storm data pack`."


@functools.cache
def pyarrow(part: str = "") -> Any:
    """The pyarrow module or one of its parts, imported when first needed."""
    try:
        return importlib.import_module(f"pyarrow{part}")
    except ImportError as error:
        raise SettingError(
            f"Arrow and Parquet files need pyarrow ({error}). Install it: pip install 'stormtorch[data]'."
        ) from error


@contextlib.contextmanager
def arrow_errors(where: str, kind: Literal["Arrow", "Parquet"] = "Arrow") -> Iterator[None]:
    """Raise errors of pyarrow and of the disk in the block as StorageError."""
    try:
        yield
    except (pyarrow().ArrowException, OSError, UnicodeDecodeError) as error:  # the last for names of columns
        if isinstance(error, StorageError):
            raise
        reason = (str(error).splitlines() or ["unknown"])[0]
        raise StorageError(
            f"{where} is not a complete {kind} file ({reason}). It is truncated or damaged: write it again."
        ) from error


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of an array in memory. ``values``: a flat Arrow array of all numbers, in order."""

    field: Field
    values: Any
    count: int

    @property
    def address(self) -> int:
        """Of the first number."""
        return int(self.values.buffers()[1].address + self.values.offset * self.field.dtype.itemsize)

    def tensor(self) -> torch.Tensor:
        """A copy: ``(count, *shape)``. Arrow's memory is read-only, and torch has no read-only tensors."""
        numbers = np.array(self.values.to_numpy(zero_copy_only=False), copy=True)
        return torch.from_numpy(numbers).view(self.count, *self.field.shape)


def rows_of(name: str, array: Any, where: str, first_row: int, expected: Field | None = None) -> Rows:
    """An Arrow array with at least one row as rows of a fixed width, which must be as ``expected``, if given.

    Raises SettingError that names the column, ``where`` (the file) and the row, counted from ``first_row``.
    """
    types = pyarrow().types
    shape: list[int] = []
    count = len(array)
    while True:
        kind = array.type
        if array.null_count:
            row = first_row + array.is_null().index(True).as_py() // max(int(np.prod(shape)), 1)
            raise SettingError(
                f"{where}: column {name!r} has no value in row {row} ({array.null_count} nulls from row {first_row}). "
                "Fill or drop them: a tensor cannot hold nulls."
            )
        if isinstance(array, pyarrow().ExtensionArray):
            array = array.storage
        elif types.is_fixed_size_list(kind):
            length = kind.list_size
            array = array.values.slice(array.offset * length, len(array) * length)
            shape.append(length)
        elif types.is_list(kind) or types.is_large_list(kind):
            offsets = array.offsets.to_numpy()
            length = _equal_length(name, offsets, where, first_row, int(np.prod(shape)))
            array = array.values.slice(offsets[0], offsets[-1] - offsets[0])
            shape.append(length)
        else:
            break
        if 0 in shape:
            raise SettingError(f"{where}: column {name!r} has empty lists (row {first_row}). {_PACK}")
    field = Field(name=name, dtype=_leaf_dtype(name, kind, where), shape=tuple(shape))
    if expected is not None and field != expected:
        raise SettingError(
            f"{where}: column {name!r} has rows of {name_of(expected.dtype)} {expected.shape} up to row {first_row}, "
            f"and of {name_of(field.dtype)} {field.shape} from there on. Make them equal, or leave the column out "
            "(open_source(..., columns=[...]))."
        )
    return Rows(field=field, values=array, count=count)


def _leaf_dtype(name: str, kind: Any, where: str) -> torch.dtype:
    """The torch dtype of a numeric Arrow type. Raises SettingError, with the reason, if there is none."""
    types = pyarrow().types
    if types.is_boolean(kind):
        raise SettingError(
            f"{where}: column {name!r} holds booleans, which Arrow packs eight to a byte. Cast it to uint8, or leave "
            "it out (open_source(..., columns=[...]))."
        )
    found = None
    if types.is_integer(kind) or types.is_floating(kind):
        found = from_numpy(np.dtype(kind.to_pandas_dtype()))
    if found is None:
        raise SettingError(f"{where}: column {name!r} is of type {kind}, whose rows have no fixed width. {_PACK}")
    return found


class TableSource(DecodedSource):
    """A table in RAM, such as ``datasets.Dataset.from_dict`` makes. Decoding copies its rows."""

    def __init__(self, name: str, table: Any, columns: Sequence[str] | None) -> None:
        self.name = name
        chosen = table.select(selected(name, "columns", table.schema.names, columns))
        self._batches = chosen.to_batches(max_chunksize=_GROUP_ROWS)
        self.groups = [batch.num_rows for batch in self._batches]
        self.fields = fields_of(self._batches[0], name, 0)

    def decode(self, group: int) -> Mapping[str, Tensor]:
        return tensors_of(self.fields, self._batches[group], self.name, sum(self.groups[:group]))


def fields_of(batch: Any, where: str, first_row: int) -> tuple[Field, ...]:
    """The fields of a record batch with at least one row."""
    return tuple(rows_of(name, batch.column(name), where, first_row).field for name in batch.schema.names)


def tensors_of(fields: Sequence[Field], batch: Any, where: str, first_row: int) -> dict[str, Tensor]:
    """The columns of a record batch as tensors. Raises SettingError if a row does not have the shape of its field."""
    return {
        field.name: rows_of(field.name, batch.column(field.name), where, first_row, field).tensor() for field in fields
    }


def _equal_length(name: str, offsets: np.ndarray[Any, np.dtype[Any]], where: str, first_row: int, per_row: int) -> int:
    lengths = np.diff(offsets)
    other = np.flatnonzero(lengths != lengths[0])
    if len(other):
        row = first_row + int(other[0]) // per_row
        raise SettingError(
            f"{where}: column {name!r} has lists of different lengths: {lengths[0]} in row {first_row}, "
            f"{lengths[other[0]]} in row {row}. {_PACK}"
        )
    return int(lengths[0])


Locate = Callable[[Rows], Strip | None]  # the strip of the rows; None if they are in no file


class CompressedArrow(SettingError):
    """The Arrow file is compressed, so its columns cannot be read from it directly."""


def arrow_source(path: Path, columns: Sequence[str] | None = None) -> FileSource:
    """The rows of one Arrow IPC file or stream. Maps it during the call; reads the layout and list offsets."""
    size = file_size(path)
    if size == 0:
        raise StorageError(f"{path} is empty: 0 bytes are not an Arrow file. Write it again.")
    arrow = pyarrow()
    with arrow_errors(str(path)), arrow.memory_map(str(path)) as mapped:
        buffer = mapped.read_buffer()

        def locate(rows: Rows) -> Strip | None:
            offset = rows.address - buffer.address
            inside = 0 <= offset <= size - rows.count * rows.field.row_bytes
            return Strip(path=path, offset=offset, stride=rows.field.row_bytes) if inside else None

        batches = list(batches_of(path, arrow.BufferReader(buffer)))
        for batch in batches:
            batch.validate()  # that its buffers are long enough for its columns
        if not batches:
            return FileSource(name=str(path), fields=(), shards=())
        source = table_in_files(str(path), arrow.Table.from_batches(batches), columns, locate)
    if source is None:
        raise CompressedArrow(
            f"{path} is compressed, so its columns cannot be read from it directly. Write it without compression "
            "(pyarrow.ipc.IpcWriteOptions(compression=None)), or pack it with `storm data pack`."
        )
    return source


def batches_of(path: Path, opened: Any) -> Iterator[Any]:
    """The record batches of an opened Arrow IPC file or stream, in order."""
    ipc = pyarrow(".ipc")
    if read_at(path, 0, 6) == b"ARROW1":
        reader = ipc.open_file(opened)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        yield from ipc.open_stream(opened)


def read_batches(path: Path) -> Iterator[Any]:
    """The record batches of an Arrow IPC file or stream, compressed or not. Raises StorageError for a damaged one."""
    with arrow_errors(str(path)), pyarrow().OSFile(str(path)) as file:
        yield from batches_of(path, file)


def table_in_files(name: str, table: Any, columns: Sequence[str] | None, locate: Locate) -> FileSource | None:
    """The rows of a table, with a shard for each contiguous run of them; None if rows are in no file."""
    fields: list[Field] = []
    strips: list[list[tuple[int, Strip]]] = []
    for column in selected(name, "columns", table.schema.names, columns):
        row, field = 0, None
        strips.append([])
        for chunk in table.column(column).chunks:
            if len(chunk):
                rows = rows_of(column, chunk, name, row, field)
                strip = locate(rows)
                if strip is None:
                    return None
                field = rows.field
                strips[-1].append((len(chunk), strip))
                row += len(chunk)
        fields += [] if field is None else [field]
    return FileSource(name=name, fields=tuple(fields), shards=tuple(cut_together(strips)))
