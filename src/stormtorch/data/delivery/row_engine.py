"""The engine for sources whose bytes STORM reads: a ledger, a reader with its threads, the delivery to the device."""

from __future__ import annotations

import os
from functools import partial

import torch

from ...core.errors import OutOfBudget
from ...core.sizes import format_bytes
from ...core.tags import Tag, Tier
from ...memory.books.ledger import Ledger
from ..readers.choice import Choice, open_reader
from ..readers.order import Order
from ..source import DecodedSource, FileSource
from .engine import BatchRange, Counts, Engine, Run
from .groups import batches_at_once
from .nan import refuse_nan
from .prefetch_depth import Depth
from .row_run import RowsRun
from .to_device import open_delivery


class RowsEngine(Engine):
    """Reads rows and delivers them in groups. Starts threads, and charges its memory to ``ledger``."""

    def __init__(
        self,
        source: FileSource | DecodedSource,
        order: Order,
        choice: Choice,
        *,
        device: torch.device,
        batch_rows: int,
        ledger: Ledger,
        threads: int | None,
        nan: str,
        counts: Counts,
    ) -> None:
        self.pid = os.getpid()
        self._ledger, self._counts, self._order = ledger, counts, order
        self._batch_rows = min(batch_rows, order.rows_per_epoch)
        self._window_rows = order.rows_per_epoch if choice.mode == "cached" else order.window_rows
        self._check = partial(refuse_nan, source) if nan == "error" else None
        batch_bytes = self._batch_rows * source.row_bytes
        used_rows = order.rows_per_epoch
        if order.settings.drop_last:
            used_rows -= used_rows % self._batch_rows
        self._group = batches_at_once(
            device,
            batch_rows=self._batch_rows,
            fields=source.fields,
            most_rows=min(used_rows, order.window_rows // 2),
            free_bytes=ledger.free_bytes(Tier.HOST) - _window_bytes(source, order, choice),
        )
        group_bytes = self._group * batch_bytes
        ahead = 2 if self._group == 1 else 1  # a copy overlaps with a step
        self._delivery = open_delivery(
            device, source.fields, self._batch_rows, ledger, batches=self._group, ahead=ahead
        )
        self._depth = Depth(group_bytes, self._delivery.grow, group=self._group)
        if self._depth.batches == 0:
            budget = ledger.budgets[Tier.HOST]
            raise OutOfBudget(
                f"Cannot take RAM for one batch of {source.name}",
                f"{format_bytes(batch_bytes)} a batch, {format_bytes(ledger.free_bytes(Tier.HOST))} left",
                f"The limit is {budget.given}{f' ({budget.reason})' if budget.reason else ''}.",
                "Raise it, or lower batch_size.",
            )
        try:
            self._reader = open_reader(
                source,
                order,
                choice,
                ledger=ledger,
                threads=threads,
                batch_rows=self._batch_rows,
                used_rows=used_rows,
                device=device,
            )
            if device.type == "cuda":  # up to a quarter of the rest, after windows and groups
                self._depth.grow_while(lambda wanted: 4 * wanted * group_bytes <= ledger.free_bytes(Tier.HOST))
        except BaseException:
            self._delivery.close()
            raise

    def run(self, span: BatchRange) -> Run:
        return RowsRun(
            span,
            self._reader,
            self._delivery,
            self._depth,
            self._counts,
            batch_rows=self._batch_rows,
            rows_per_epoch=self._order.rows_per_epoch,
            window_rows=self._window_rows,
            group=self._group,
            check=self._check,
        )

    @property
    def depth_batches(self) -> int:
        return self._depth.batches * self._group

    @property
    def ring_bytes(self) -> int:
        return self._ledger.used_bytes(Tier.HOST, Tag.DATA)

    def close(self) -> None:
        if os.getpid() != self.pid:
            return
        try:
            self._reader.close()
        finally:
            self._delivery.close()


def _window_bytes(source: FileSource | DecodedSource, order: Order, choice: Choice) -> int:
    """The memory that windows will take; batches get the rest."""
    if choice.mode == "cached":
        return 0
    rows = order.window_rows
    if isinstance(source, DecodedSource):  # whole groups; the first and the last may lie in two windows
        rows = min(source.rows, rows + 2 * max(source.groups))
    return 2 * rows * source.row_bytes
