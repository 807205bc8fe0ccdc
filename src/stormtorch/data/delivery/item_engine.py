"""Items of a torch ``Dataset``: torch's own loader reads them, in worker processes, with our order as its sampler.

This engine copies them to the device. Their shapes are not known before torch has collated them, so it cannot plan
page-locked memory. It copies each batch on a separate stream: the host waits for the copy, as it would for one to
page-locked memory, but not for work that is queued on the GPU.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any

import torch
import torch.utils.data

from ...core.errors import StorageError
from ...core.events import Span, What
from ...core.tags import Tag
from ...native.cores import usable_count
from ..formats.items import ItemSource
from .engine import EngineSettings, first_nan_row


class ItemEngine:
    """As RowsEngine. Keeps nothing from one loop to the next: torch's worker processes belong to one iteration."""

    ring_bytes = 0

    def __init__(self, source: ItemSource, settings: EngineSettings) -> None:
        self.pid = os.getpid()
        self._source, self._settings = source, settings
        self._workers = min(4, usable_count()) if settings.workers is None else settings.workers
        self.depth_batches = 2 * self._workers
        self._batches: Iterator[Any] = iter(())
        self._rows: Iterator[list[int]] = iter(())  # of each batch
        self._stream = torch.cuda.Stream(settings.device) if settings.device.type == "cuda" else None

    def start(self, begin: int, end: int) -> None:
        sampler, self._rows = itertools.tee(map(self._rows_of, range(begin, end)))  # torch asks some batches ahead
        self._batches = iter(
            torch.utils.data.DataLoader(self._source.dataset, batch_sampler=sampler, num_workers=self._workers)
        )

    def _rows_of(self, number: int) -> list[int]:
        order, most = self._settings.order, self._settings.batch_rows
        epoch, batch = divmod(number, self._settings.per_epoch)
        rows: list[int] = order.rows(epoch, batch * most, min(most, order.rows_per_epoch - batch * most)).tolist()
        return rows

    def next(self) -> tuple[Any, int, int] | None:
        start_s = perf_counter()
        batch = next(self._batches, None)
        self._settings.counts(Span(What.WAIT, start_s, perf_counter(), "data", Tag.DATA))
        if batch is None:
            return None
        rows = next(self._rows)
        if self._settings.refuses_nan:
            _refuse_nan(self._source.name, batch, rows)
        if self._stream is not None:
            batch = self._sent(batch, self._stream)
        tensors = _tensors(batch)
        samples = len(tensors[0]) if tensors and tensors[0].dim() else 1
        return batch, samples, sum(tensor.nbytes for tensor in tensors)

    def _sent(self, batch: Any, stream: torch.cuda.Stream) -> Any:
        """Copy the batch to the device. Its memory is the copying stream's; records the current stream as a user."""
        device = self._settings.device
        now = torch.cuda.current_stream(device)
        with torch.cuda.stream(stream), torch.inference_mode(False):
            there = _mapped(batch, lambda tensor: tensor.to(device))
        now.wait_stream(stream)
        for tensor in _tensors(there):
            tensor.record_stream(now)
        return there

    def stop(self) -> None:
        self._batches = self._rows = iter(())  # torch ends its workers with its iterator

    def close(self) -> None:
        """Nothing is left after ``stop``."""


def _refuse_nan(name: str, batch: Any, rows: list[int]) -> None:
    """Raise for the first NaN of a batch, with the item."""
    for tensor in _tensors(batch):
        at = first_nan_row(tensor.reshape(1, 1) if tensor.dim() == 0 else tensor.contiguous())
        if at is not None:
            item = f"item {rows[at]}" if tensor.dim() > 0 and len(tensor) == len(rows) else f"one of the items {rows}"
            raise StorageError(
                f"NaN in {item} of {name}, which nan='error' refuses. Fix the item, or allow NaN with nan='allow'."
            )


def _mapped(batch: Any, function: Callable[[torch.Tensor], object]) -> Any:
    """Apply ``function`` to the tensors of a batch, in the containers of torch's collation; keep other objects."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: _mapped(value, function) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_mapped(value, function) for value in batch)
    return batch


def _tensors(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(batch, found.append)
    return found
