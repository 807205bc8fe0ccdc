"""Finds NaN in batches before they reach the model, while the row that it came from is known."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.errors import StorageError
from ..readers.layout import Layout
from ..readers.reader import Read
from ..source import DecodedSource, Field, FileSource
from .to_device import HostGroup


def first_nan_row(tensor: torch.Tensor) -> int | None:
    """The first row of a CPU batch that holds a NaN; infinities are allowed. Blocks; one pass over the bytes."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return None
    if not tensor.sum().isnan():  # necessary, not sufficient: inf - inf is NaN too
        return None
    found = tensor.isnan().view(tensor.shape[0], -1).any(dim=1).nonzero()
    return int(found[0]) if len(found) else None


class NanCheck:
    """Raises for the first NaN of a batch, with the file and the row."""

    def __init__(self, source: FileSource | DecodedSource, fields: Sequence[Field]) -> None:
        self._source, self._fields = source, fields

    def __call__(self, memory: HostGroup, read: Read) -> None:
        for number, (field, data) in enumerate(zip(self._fields, memory.fields, strict=True)):
            at = first_nan_row(data.view(field.dtype).view(memory.count, -1))
            if at is not None:
                row = int(read.rows[at])
                raise StorageError(
                    f"NaN in field {field.name!r} of {self._place(row, number)}, which nan='error' refuses. Fix the "
                    "row, or allow NaN with nan='allow'."
                )

    def _place(self, row: int, field: int) -> str:
        if isinstance(self._source, DecodedSource):
            return self._source.place_of(row)
        return Layout(self._source).describe(row, field)
