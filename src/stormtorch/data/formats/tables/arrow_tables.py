"""Arrow tables, in groups of rows. A column whose rows all have the same number of bytes becomes a field.

Accepted: integers, floats, and (nested) lists of them in which every row has the same length, of a fixed-size type or
not. Nulls are refused: a tensor cannot hold them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ....core.errors import SettingError, StorageError
from ...source import DecodedSource, Field
from ..columns import selected
from ..dtypes import BY_NAME, name_of

_TYPES = {"halffloat": "float16", "float": "float32", "double": "float64"}  # by Arrow's name
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
            row = first_row + _first_null(array) // max(int(np.prod(shape)), 1)
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
    found = str(kind)
    dtype = BY_NAME.get(_TYPES.get(found, found)) if types.is_integer(kind) or types.is_floating(kind) else None
    if dtype is None:
        raise SettingError(f"{where}: column {name!r} is of type {found}, whose rows have no fixed width. {_PACK}")
    return dtype


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


def _first_null(array: Any) -> int:
    return int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
