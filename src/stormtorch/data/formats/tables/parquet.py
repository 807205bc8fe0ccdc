"""Parquet files. Their pages are encoded and mostly compressed, so pyarrow decodes them, a row group at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ....core.errors import SettingError, StorageError
from ...source import DecodedSource, Field
from ..columns import check_equal_fields, selected
from ..paths import file_size
from .arrow import arrow_errors, fields_of, pyarrow, tensors_of


@dataclass(frozen=True, kw_only=True)
class _Group:
    path: Path
    number: int  # in its file
    first_row: int  # in its file


class ParquetSource(DecodedSource):
    """The row groups of one or several Parquet files, in order. Reads footers, and first rows for shapes of lists."""

    def __init__(self, name: str, paths: Sequence[Path], columns: Sequence[str] | None = None) -> None:
        self.name = name
        self._footers: dict[Path, Any] = {}
        self._places: list[_Group] = []
        groups: list[int] = []
        for path in paths:
            with opened_parquet(path) as file:
                self._footers[path] = footer = file.metadata
                if footer.num_rows == 0:
                    continue
                chosen = selected(str(path), "columns", file.schema_arrow.names, columns)
                fields = _fields(path, file, chosen)
            if not groups:
                self.fields = fields
            check_equal_fields(str(self._places[0].path if self._places else path), self.fields, str(path), fields)
            first_row = 0
            for number in range(footer.num_row_groups):
                rows = footer.row_group(number).num_rows
                if rows:
                    _check_lengths(path, footer, number, first_row, fields)
                    self._places.append(_Group(path=path, number=number, first_row=first_row))
                    groups.append(rows)
                first_row += rows
        self.groups = groups
        if not groups:
            raise SettingError(f"{name} has no rows (files read: {len(paths)}). Give data with at least one row.")

    def decode(self, group: int) -> Mapping[str, Tensor]:
        place = self._places[group]
        names = [field.name for field in self.fields]
        where = f"{place.path}, row group {place.number}"
        with arrow_errors(where, "Parquet"), opened_parquet(place.path, self._footers[place.path]) as file:
            # One thread: the loader decodes as many groups at once as it has cores for.
            table = file.read_row_group(place.number, columns=names, use_threads=False)
        if table.num_rows != self.groups[group]:
            raise StorageError(
                f"{where} has {table.num_rows} rows, its footer says {self.groups[group]}. Write it again."
            )
        batch = table.combine_chunks().to_batches()[0]
        return tensors_of(self.fields, batch, where, place.first_row)

    def files(self) -> Sequence[Path]:
        return list(dict.fromkeys(place.path for place in self._places))

    def place_of(self, row: int) -> str:
        for place, rows in zip(self._places, self.groups, strict=True):
            if row < rows:
                return f"row {place.first_row + row} of {place.path}"
            row -= rows
        return super().place_of(row)


def opened_parquet(path: Path, footer: Any = None) -> Any:
    """A ParquetFile, to be closed by its ``with``."""
    if file_size(path) == 0:
        raise StorageError(f"{path} is empty: 0 bytes are not a Parquet file. Write it again.")
    with arrow_errors(str(path), "Parquet"):
        return pyarrow(".parquet").ParquetFile(path, metadata=footer)


def _fields(path: Path, file: Any, chosen: Sequence[str]) -> tuple[Field, ...]:
    with arrow_errors(str(path), "Parquet"):
        first = next(iter(file.iter_batches(batch_size=1, columns=list(chosen), use_threads=False)))
    return fields_of(first.select(list(chosen)), str(path), 0)


def _check_lengths(path: Path, footer: Any, number: int, first_row: int, fields: Sequence[Field]) -> None:
    """Compare a row group's count of numbers with that of rows of equal length."""
    group = footer.row_group(number)
    numbers = {field.name: math.prod(field.shape) for field in fields}  # in a row
    for column in map(group.column, range(group.num_columns)):
        name = column.path_in_schema.split(".")[0]
        if name in numbers and column.num_values != group.num_rows * numbers[name]:
            raise SettingError(
                f"{path}: column {name!r} has {column.num_values} numbers in rows {first_row} to "
                f"{first_row + group.num_rows - 1}, and {numbers[name]} in row 0: lists of different lengths. "
                "Leave it out (open_source(..., columns=[...])), or make tokens of it with `storm data pack`."
            )
