"""Batches that are read and sent together.

A batch costs the thread that asks for it some tenths of a millisecond, however small it is: addresses to gather from,
threads to wake, on the way to a GPU copies and events. A small model's whole step takes a few. So small batches that
follow each other are read, and sent, as one *group*.

On a GPU each is then copied out of it, for microseconds, into memory of its own: what a batch holds is the user's, and
the group's memory is free when its last batch was given. On the CPU a copy would cost as much as reading: there each
batch is a storage of its own over a part of the group's memory, which is used again when all of them are gone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.sizes import MiB
from ..source import Field
from .buffers import LINE

# Of a group. On a GPU up to two are there at a time; on the CPU a batch that is kept keeps the memory of all.
_MOST_BYTES = {"cpu": 8 * MiB, "cuda": 32 * MiB}
_MOST_BATCHES = {"cpu": 8, "cuda": 32}
_SHARE = 32  # of the memory that there is, what a group may take
_ROW_BYTES = 56  # of a field: what reading a row takes beside the row


def batches_at_once(
    device: torch.device, *, batch_rows: int, fields: Sequence[Field], most_rows: int, free_bytes: int
) -> int:
    """How many batches a group has. ``most_rows``: of a group."""
    if device.type == "cpu" and any(batch_rows * field.row_bytes % LINE for field in fields):
        return 1  # only the first would begin where memory of the user's should
    batch_bytes = batch_rows * sum(field.row_bytes + _ROW_BYTES for field in fields)
    kind = "cpu" if device.type == "cpu" else "cuda"
    group_bytes = min(_MOST_BYTES[kind], free_bytes // _SHARE)
    return max(1, min(_MOST_BATCHES[kind], most_rows // batch_rows, group_bytes // batch_bytes))
