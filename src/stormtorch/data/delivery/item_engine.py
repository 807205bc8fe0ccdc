"""Items of a torch ``Dataset``: torch's own loader reads them, in worker processes, with our order as its sampler.

This engine copies them to the device. Their shapes are not known before torch has collated them, so it cannot plan
page-locked memory. It copies each batch on a separate stream: the host waits for the copy, as it would for one to
page-locked memory, but not for work that is queued on the GPU.
"""

from __future__ import annotations

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
from ..readers.order import Order
from .engine import BatchRange, Counts, Engine, Run
from .nan import first_nan_row


class ItemEngine(Engine):
    """Keeps nothing from one loop to the next: torch's worker processes belong to one iteration."""

    def __init__(
        self,
        source: ItemSource,
        order: Order,
        *,
        device: torch.device,
        batch_rows: int,
        workers: int | None,
        nan: str,
        counts: Counts,
    ) -> None:
        self.pid = os.getpid()
        self._source, self._order, self._device = source, order, device
        self._batch_rows, self._counts, self._nan = batch_rows, counts, nan
        self._workers = min(4, usable_count()) if workers is None else workers

    def run(self, span: BatchRange) -> Run:
        batches = _Batches(self._order, span, self._batch_rows)
        loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            self._source.dataset,
            batch_sampler=batches,
            num_workers=self._workers,
        )

        def check(batch: Any, place: tuple[int, int]) -> None:
            if self._nan == "error":
                _refuse_nan(self._source.name, batch, batches.rows(*place))

        return ItemRun(iter(loader), span, self._device, self._counts, check)

    @property
    def depth_batches(self) -> int:
        return 2 * self._workers

    @property
    def ring_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


class _Batches:
    """The rows of each batch of a span."""

    def __init__(self, order: Order, span: BatchRange, batch_rows: int) -> None:
        self._order, self._span, self._batch_rows = order, span, batch_rows

    def __iter__(self) -> Iterator[list[int]]:
        epoch, batch = self._span.epoch, self._span.batch
        while epoch < self._span.end_epoch:
            yield self.rows(epoch, batch)
            epoch, batch = self._span.after(epoch, batch)

    def __len__(self) -> int:
        span = self._span
        return (span.end_epoch - span.epoch) * span.per_epoch - span.batch

    def rows(self, epoch: int, batch: int) -> list[int]:
        first = batch * self._batch_rows
        count = min(self._batch_rows, self._order.rows_per_epoch - first)
        rows: list[int] = self._order.rows(epoch, first, count).tolist()
        return rows


def _refuse_nan(name: str, batch: Any, rows: list[int]) -> None:
    """Raise for the first NaN of a batch, with the item."""
    for tensor in _tensors(batch):
        at = first_nan_row(tensor.reshape(1, 1) if tensor.dim() == 0 else tensor.contiguous())
        if at is not None:
            item = f"item {rows[at]}" if tensor.dim() > 0 and len(tensor) == len(rows) else f"one of the items {rows}"
            raise StorageError(
                f"NaN in {item} of {name}, which nan='error' refuses. Fix the item, or allow NaN with nan='allow'."
            )


class ItemRun(Run):
    """Batches out of torch's loader."""

    def __init__(
        self,
        batches: Iterator[Any],
        span: BatchRange,
        device: torch.device,
        counts: Counts,
        check: Callable[[Any, tuple[int, int]], None],
    ) -> None:
        """``check`` is called with each batch and its place, and raises for one that is not to be given."""
        self._batches: Iterator[Any] | None = batches
        self._span, self._place = span, (span.epoch, span.batch)
        self._device, self._counts, self._check = device, counts, check
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def next(self) -> tuple[Any, int, int] | None:
        if self._batches is None:
            return None
        start_s = perf_counter()
        batch = next(self._batches, None)
        self._counts(Span(What.WAIT, start_s, perf_counter(), "data", Tag.DATA))
        if batch is None:
            return None
        self._check(batch, self._place)
        self._place = self._span.after(*self._place)
        if self._stream is not None:
            batch = self._sent(batch, self._stream)
        tensors = _tensors(batch)
        samples = len(tensors[0]) if tensors and tensors[0].dim() else 1
        return batch, samples, sum(tensor.nbytes for tensor in tensors)

    def _sent(self, batch: Any, stream: torch.cuda.Stream) -> Any:
        """Copy the batch to the device. Its memory is the copying stream's; records the current stream as a user."""
        now = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(stream), torch.inference_mode(False):
            there = _mapped(batch, lambda tensor: tensor.to(self._device))
        now.wait_stream(stream)
        for tensor in _tensors(there):
            tensor.record_stream(now)
        return there

    def close(self) -> None:
        self._batches = None  # torch ends its workers with its iterator


def _mapped(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
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

    def look(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _mapped(batch, look)
    return found
