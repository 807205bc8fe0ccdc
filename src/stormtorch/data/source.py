"""A dataset as the loader sees it: fields, and where their rows lie.

Rows of a fixed width are a ``FileSource``: the loader reads their bytes straight into the batch. Rows that must be
decoded (Parquet) are a ``DecodedSource``: the loader requests whole groups of rows. To make either reads the layout
alone, and keeps no file open.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ..core.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class Field:
    """One tensor of every row. ``shape``: of one row, ``()`` for a scalar."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @cached_property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Strip:
    """Rows of one field in one file, the first at byte ``offset``, each next one ``stride`` bytes further.

    They may overlap (windows over a flat file of tokens) or have gaps (several fields in one record).
    """

    path: Path
    offset: int
    stride: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """``rows`` rows, with one strip for each field, such as an array's file or an Arrow file's record batch."""

    rows: int
    strips: tuple[Strip, ...]


class RowSource:
    """``name``: its name in errors, as the user gave it. ``groups``: the rows of each shard, or of what is decoded."""

    name: str
    fields: tuple[Field, ...]
    groups: Sequence[int]

    @cached_property
    def rows(self) -> int:
        return sum(self.groups)

    @cached_property
    def row_bytes(self) -> int:
        return sum(field.row_bytes for field in self.fields)


@dataclass(frozen=True, kw_only=True)
class FileSource(RowSource):
    """Rows of a fixed width in files. Row numbers count through all shards."""

    name: str
    fields: tuple[Field, ...]
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        for field in self.fields:
            if field.row_bytes == 0:
                raise SettingError(
                    f"Field {field.name!r} of {self.name} has rows of zero bytes (shape {field.shape}). Leave it out."
                )

    @cached_property
    def groups(self) -> Sequence[int]:  # type: ignore[override]
        return [shard.rows for shard in self.shards]


class DecodedSource(RowSource, ABC):
    """Rows that a decoder gives, a group at a time."""

    @abstractmethod
    def decode(self, group: int) -> Mapping[str, Tensor]:
        """The rows of one group: for each field a contiguous CPU tensor ``(rows, *shape)``.

        Blocks. Called from several threads at once. Raises StormError that names the file, and the row where known.
        """

    def files(self) -> Sequence[Path]:
        """The files that rows are decoded from, in order; none for data in RAM."""
        return ()

    def place_of(self, row: int) -> str:
        """The place of a row, for an error: a file, and the row in it."""
        return f"row {row} of {self.name}"
