"""Finds NaN in batches before they reach the model, while the row that it came from is known."""

from __future__ import annotations

import torch

from ...core.errors import StorageError
from ..readers.layout import Layout
from ..readers.reader import Read
from ..source import DecodedSource, FileSource
from .to_device import HostGroup, as_fields


def first_nan_row(tensor: torch.Tensor) -> int | None:
    """The first row of a CPU batch that holds a NaN; infinities are allowed. Blocks; one pass over the bytes."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return None
    if not tensor.sum().isnan():  # necessary, not sufficient: inf - inf is NaN too
        return None
    found = tensor.isnan().view(tensor.shape[0], -1).any(dim=1).nonzero()
    return int(found[0]) if len(found) else None


def refuse_nan(source: FileSource | DecodedSource, memory: HostGroup, read: Read) -> None:
    """Raise for the first NaN of a batch, with the file and the row."""
    for number, (field, data) in enumerate(zip(source.fields, as_fields(memory, source.fields), strict=True)):
        at = first_nan_row(data)
        if at is not None:
            row = int(read.rows[at])
            place = Layout(source).describe(row, number) if isinstance(source, FileSource) else source.place_of(row)
            raise StorageError(
                f"NaN in field {field.name!r} of {place}, which nan='error' refuses. Fix the row, or allow NaN with "
                "nan='allow'."
            )
