"""What a dataset is to the loader: fields, and where their rows lie.

- A *field* is one named tensor of a row: its dtype and its shape.
- A *strip* is where rows of one field lie in one file: the first at ``offset``, each next one ``stride`` bytes on.
  Rows may overlap (windows over a flat file of tokens) and may have gaps between them (several fields in one record).
- A *shard* is a run of rows that has one strip for each field. A file of an array, a record batch of an Arrow file.
- A *source* is the shards in order; a row's number counts through all of them.

Everything that has rows of a fixed width is a ``FileSource``: the loader reads its bytes itself, straight to where the
batch is put together. What must be decoded first (Parquet) is a ``DecodedSource``: the loader asks for whole groups of
rows. Neither keeps a file open or reads data when it is made, beyond what it takes to know the layout.
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


@dataclass(frozen=True, kw_only=True)
class Field:
    """One tensor of every row. ``shape`` is that of one row: ``()`` for a scalar."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @cached_property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Strip:
    """Rows of one field in one file, the first at byte ``offset``, each next one ``stride`` bytes further."""

    path: Path
    offset: int
    stride: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """``rows`` rows, with one strip for each field of the source, in the order of the fields."""

    rows: int
    strips: tuple[Strip, ...]


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """Rows of a fixed width in files. ``name`` is what errors call it: what the user named."""

    name: str
    fields: tuple[Field, ...]
    shards: tuple[Shard, ...]

    @cached_property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @cached_property
    def row_bytes(self) -> int:
        return sum(field.row_bytes for field in self.fields)


class DecodedSource(ABC):
    """Rows that come out of a decoder, a group at a time. ``groups`` are the rows of each group, in order."""

    name: str
    fields: tuple[Field, ...]
    groups: Sequence[int]

    @cached_property
    def rows(self) -> int:
        return sum(self.groups)

    @cached_property
    def row_bytes(self) -> int:
        return sum(field.row_bytes for field in self.fields)

    @abstractmethod
    def decode(self, group: int) -> Mapping[str, Tensor]:
        """The rows of one group: for each field a contiguous CPU tensor ``(rows, *shape)``.

        Blocks. Called from several threads at once. Raises StormError that names the file, and the row where known.
        """

    def files(self) -> Sequence[Path]:
        """The files that rows are decoded from, in order; none for what lies in RAM."""
        return ()

    def place_of(self, row: int) -> str:
        """Where a row comes from, in words, for an error: a file, and the row in it."""
        return f"row {row} of {self.name}"
