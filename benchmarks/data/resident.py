"""The same data on the device all along: what a loader is measured against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stormtorch.core.sizes import GiB
from stormtorch.data.loader import DataLoader

Batch = tuple[Tensor, Tensor]
_LEFT_FREE = 4 * GiB  # of VRAM, for the training


class Resident:
    """Images and labels on the device, and the row numbers of ``batches`` batches in the order of ``like``.

    The indices are there before anything is timed, and each batch is two gathers: there is no cheaper way to shuffle.
    """

    def __init__(self, ordered: DataLoader, like: DataLoader, batches: int) -> None:
        """Reads all of ``ordered``, which must not shuffle."""
        device, rows = ordered.device, ordered.source.rows
        self._images, self._labels = torch.empty(0), torch.empty(0)
        first = 0
        for batch in ordered:
            images, labels = batch["images"], batch["labels"]
            if first == 0:
                self._images = torch.empty((rows, *images.shape[1:]), dtype=images.dtype, device=device)
                self._labels = torch.empty((rows, *labels.shape[1:]), dtype=labels.dtype, device=device)
            self._images[first : first + len(labels)] = images
            self._labels[first : first + len(labels)] = labels
            first += len(labels)
        count = min(batches, len(like)) * like.batch_size
        numbers = torch.from_numpy(like._order.rows(0, 0, count).copy()).to(device)
        self._index = numbers.split(like.batch_size)

    def stream(self) -> Iterator[Batch]:
        """For ever."""
        while True:
            for index in self._index:
                yield self._images.index_select(0, index), self._labels.index_select(0, index)


def room_for(total_bytes: int, device: torch.device) -> str:
    """Why the data do not fit on the device; empty if they do."""
    if device.type != "cuda":
        return ""
    free = torch.cuda.mem_get_info(device)[0] - _LEFT_FREE
    if total_bytes <= free:
        return ""
    return f"{total_bytes / 1e9:.0f} GB do not fit in VRAM, of which {free / 1e9:.0f} GB are free"
