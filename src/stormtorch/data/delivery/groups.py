"""Batches that are read and sent together.

A batch of any size costs the calling thread some tenths of a millisecond: it computes addresses, wakes threads, and
for a GPU queues copies and events. A small model's whole step takes a few. So the loader reads and sends consecutive
small batches as one *group*.

On a GPU each batch is then copied out of the group, in microseconds: the batch is the user's memory, and the group's
memory is free after its last batch. On the CPU a copy would cost as much as reading: each batch has its own storage
over a part of the group's memory, which is used again when all of them are gone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.sizes import MiB
from ..source import Field
from .buffers import LINE

# Limits of a group. On a GPU up to two exist at a time; on the CPU a batch that the user keeps holds the whole group.
_MAX_BYTES = {"cpu": 8 * MiB, "cuda": 32 * MiB}
_MAX_BATCHES = {"cpu": 8, "cuda": 32}
_SHARE = 32  # a group takes at most this fraction of the free memory
_ROW_BYTES = 56  # reading takes as much for each row of a field, beside the row


def batches_at_once(
    device: torch.device, *, batch_rows: int, fields: Sequence[Field], most_rows: int, free_bytes: int
) -> int:
    """The number of batches in a group. ``most_rows``: the limit of a group."""
    if device.type == "cpu" and any(batch_rows * field.row_bytes % LINE for field in fields):
        return 1  # only the first batch would be aligned
    batch_bytes = batch_rows * sum(field.row_bytes + _ROW_BYTES for field in fields)
    kind = "cpu" if device.type == "cpu" else "cuda"
    group_bytes = min(_MAX_BYTES[kind], free_bytes // _SHARE)
    return max(1, min(_MAX_BATCHES[kind], most_rows // batch_rows, group_bytes // batch_bytes))
