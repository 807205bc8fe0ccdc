"""Batches that travel together.

On the way to a GPU a batch costs the thread that launches work some tenths of a millisecond, however small it is:
addresses to gather from, copies, events. A small model's whole step takes a few. So small batches that follow each
other are read and sent as one *group*. On the device each is copied out of it, for microseconds, into memory of its
own: what a batch holds is the user's, and the group's memory is free when its last batch was given."""

from __future__ import annotations

import torch

from ..core.sizes import MiB

_GROUP_BYTES = 32 * MiB  # up to two groups are on the device
_MOST = 32
_SHARE = 32  # of the memory that there is, what a group may take
_ROW_BYTES = 56  # of a field: what reading a row takes beside the row


def batches_at_once(
    device: torch.device, *, batch_rows: int, row_bytes: int, fields: int, most_rows: int, free_bytes: int
) -> int:
    """How many batches a group has. On the CPU there is nothing to send. ``most_rows``: of a group."""
    if device.type == "cpu":
        return 1
    batch_bytes = batch_rows * (row_bytes + fields * _ROW_BYTES)
    return max(1, min(_MOST, most_rows // batch_rows, min(_GROUP_BYTES, free_bytes // _SHARE) // batch_bytes))
