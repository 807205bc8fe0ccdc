"""The engine for sources whose bytes STORM reads: a ledger, a reader with its threads, the delivery to the device.

It reads batches in groups (to_device.py), without Python threads. A request for a batch first gives the reading threads
the group ``depth`` groups ahead, then waits for its own group if that is not there yet.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...core.errors import OutOfBudget, SettingError, StorageError, StormError
from ...core.events import Span, What
from ...core.sizes import format_bytes
from ...core.tags import Tag, Tier
from ...memory.books.ledger import Ledger
from ...memory.disk.files import open_file
from ...native.cores import usable_count
from ..readers.cached_reader import CachedRead, CachedReader
from ..readers.choice import Choice
from ..readers.decoded_windows import DecodedWindows
from ..readers.file_windows import FileWindows
from ..readers.layout import Layout
from ..readers.order import Order
from ..readers.window_reader import WindowRead, WindowReader, Windows, windows_needed
from ..source import DecodedSource, FileSource
from .engine import EngineSettings, first_nan_row
from .prefetch_depth import Depth
from .to_device import as_fields, batches_at_once, open_delivery

_MIN_CORES = 4  # to launch work and gather rows, and one or two for one more copy


@dataclass(slots=True)
class _Pending:
    """A group that is being read; ``end``: the batch after it."""

    read: CachedRead | WindowRead
    memory: Any  # a group of the delivery
    end: int
    batches: int
    failed: bool = False


class RowsEngine:
    """Reads rows and delivers them. Starts threads, and charges its memory to ``ledger``."""

    def __init__(
        self, source: FileSource | DecodedSource, choice: Choice, ledger: Ledger, settings: EngineSettings
    ) -> None:
        self.pid = os.getpid()
        self._source, self._ledger, self._settings = source, ledger, settings
        self._order, self._per_epoch = settings.order, settings.per_epoch
        order = settings.order
        self._batch_rows = min(settings.batch_rows, order.rows_per_epoch)
        self._window_rows = order.rows_per_epoch if choice.mode == "cached" else order.window_rows
        batch_bytes = self._batch_rows * source.row_bytes
        used_rows = order.rows_per_epoch
        if order.settings.drop_last:
            used_rows -= used_rows % self._batch_rows
        self._group = batches_at_once(
            settings.device,
            batch_rows=self._batch_rows,
            fields=source.fields,
            most_rows=min(used_rows, order.window_rows // 2),
            free_bytes=ledger.free_bytes(Tier.HOST) - _window_bytes(source, order, choice),
        )
        group_bytes = self._group * batch_bytes
        ahead = 2 if self._group == 1 else 1  # a copy overlaps with a step
        self._delivery = open_delivery(
            settings.device, source.fields, self._batch_rows, ledger, batches=self._group, ahead=ahead
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
            self._reader = self._opened_reader(choice, used_rows)
            if settings.device.type == "cuda":  # up to a quarter of the rest, after windows and groups
                self._depth.grow_while(lambda wanted: 4 * wanted * group_bytes <= ledger.free_bytes(Tier.HOST))
        except BaseException:
            self._delivery.close()
            raise
        self._pending: deque[_Pending] = deque()
        self._sent: deque[Any] = deque()
        self._given: Iterator[list[torch.Tensor]] = iter(())  # the remaining batches of the group in use
        self._left = 0  # their number

    def _opened_reader(self, choice: Choice, used_rows: int) -> CachedReader | WindowReader:
        """The reader of that choice. Starts threads; takes memory for windows."""
        source, order, ledger, threads = self._source, self._order, self._ledger, self._settings.workers
        copiers = threads or max(1, min(4, usable_count() - 1))  # the calling thread helps while it waits
        if isinstance(source, FileSource) and choice.mode == "cached":
            return CachedReader(source, order, threads=copiers)
        if order.settings.shuffle == "full":
            how, other = "decoded in whole groups", "`storm data pack` the data first"
            if choice.mode == "direct":
                how, other = f"read from disk ({choice.reason})", "reading='cached' if RAM is large enough"
            raise SettingError(
                f"shuffle='full' reads rows one by one, in random order, and {source.name} is {how}. Use shuffle=True, "
                f"or {other}."
            )
        count = windows_needed(order, self._batch_rows)
        windows: Windows
        if isinstance(source, DecodedSource):
            copiers = threads or min(4, usable_count())
            windows = DecodedWindows(source, ledger=ledger, count=count, threads=copiers)
        else:
            with open_file(source.shards[0].strips[0].path) as trial:
                direct = trial.mode == "direct"
            staged = self._settings.device.type == "cuda" and usable_count() >= _MIN_CORES
            windows = FileWindows(source, order, ledger=ledger, count=count, direct=direct, staged=staged)
        try:
            return WindowReader(windows, order, threads=copiers, used_rows=used_rows)
        except BaseException:
            windows.close()
            raise

    def start(self, begin: int, end: int) -> None:
        """Start reading the batches from ``begin`` up to ``end``. Nothing else is being read: ``stop`` comes first."""
        self._cursor, self._place, self._end = begin, begin, end  # the batch to read next, and the one to give next
        self._single_until = begin  # up to this place, read batches one by one
        self._ramp = 1  # the most batches of the next group: the first batch must not wait for a large group
        self._restart_reader()

    def _restart_reader(self) -> None:
        epoch, batch = divmod(self._cursor, self._per_epoch)
        self._reader.restart(epoch, batch * self._batch_rows)

    def next(self) -> tuple[list[torch.Tensor], int, int] | None:
        """The next batch, on its device, with its samples and bytes; None after the last. Blocks until it is read."""
        if not self._left and not self._take_group():
            return None
        given = next(self._given)
        self._left -= 1
        if not self._left:
            self._given = iter(())
        if self._left <= self._group // 2:  # by now the memory of the next group was allocated some steps ago
            self._send_ahead()
        if self._group == 1:
            self._delivery.prepare()
        self._place += 1
        return given, given[0].shape[0], sum(tensor.nbytes for tensor in given)

    def stop(self) -> None:
        """Cancel pending reads and copies; none is running when it returns. Idempotent."""
        self._given, self._left = iter(()), 0
        self._reader.stop()
        while self._pending:
            self._delivery.drop(self._pending.popleft().memory)
        while self._sent:
            self._delivery.drop(self._sent.popleft())

    @property
    def depth_batches(self) -> int:
        """Batches to prefetch."""
        return self._depth.batches * self._group

    @property
    def ring_bytes(self) -> int:
        """Host memory charged to the ledger."""
        return self._ledger.used_bytes(Tier.HOST, Tag.DATA)

    def close(self) -> None:
        """End the threads and return everything. Idempotent; does nothing in a forked child."""
        if os.getpid() != self.pid:
            return
        try:
            self._reader.close()
        finally:
            self._delivery.close()

    def _take_group(self) -> bool:
        """Begin with the next group; False if there are no more."""
        self._prefetch()
        if len(self._pending) >= self._depth.batches and self._pending[-1].read.ready():
            self._depth.was_full = True
        if not self._sent:
            if not self._pending:
                return False
            self._send_first()
        group = self._sent.popleft()
        self._given, self._left = self._delivery.give(group), -(-group.count // self._batch_rows)
        if self._group > 1 and self._pending:
            self._delivery.prepare()
        return True

    def _prefetch(self) -> None:
        if len(self._pending) > self._depth.batches // 2:
            return  # request several at a time: wakes the threads once
        while len(self._pending) < self._depth.batches and self._cursor < self._end:
            epoch, batch = divmod(self._cursor, self._per_epoch)
            first, batches = batch * self._batch_rows, self._batches_from(batch)
            count = min(batches * self._batch_rows, self._order.rows_per_epoch - first)
            memory: Any = self._delivery.take(count, block=not self._pending and not self._sent)
            if memory is None:
                return
            addresses = [tensor.data_ptr() for tensor in memory.fields]
            read = self._reader.start(epoch, first, count, addresses, memory.fields)
            if read is None:
                self._delivery.drop(memory)
                if not self._pending and not self._sent:
                    assert self._reader.refused is not None, "this read has no earlier one to wait for"
                    raise self._reader.refused
                return
            self._ramp = min(2 * self._ramp, self._group)
            self._cursor += batches
            self._pending.append(_Pending(read, memory, self._cursor, batches))

    def _batches_from(self, batch: int) -> int:
        """How many batches to read at once. A group ends with its window: the next one may have no memory yet."""
        if self._cursor < self._single_until:
            return 1
        first = batch * self._batch_rows
        last = first + self._batch_rows - 1  # of the first batch, which may cross windows
        end = last - last % self._window_rows + self._window_rows
        left = min(self._per_epoch - batch, (end - first) // self._batch_rows)
        groups = -(-left // self._ramp)
        return -(-left // groups)  # equal sizes: a small group costs as much as a large one

    def _send_first(self) -> None:
        """Wait for the next group and send it. If it cannot be read, give the batches before the bad one first."""
        try:
            self._send()
        except StormError:
            failed = self._pending[0]
            if failed.batches == 1:
                raise
            self.stop()
            self._cursor, self._single_until = self._place, failed.end
            self._restart_reader()
            self._prefetch()
            self._send()

    def _send_ahead(self) -> None:
        while len(self._sent) < self._delivery.ahead and self._pending:
            first = self._pending[0]
            if first.failed or not first.read.ready():
                return
            try:
                self._send()
            except StormError:
                first.failed = True  # the error is raised when the batch is due
                return

    def _send(self) -> None:
        pending = self._pending[0]
        if not pending.read.ready():
            start_s = time.perf_counter()
            pending.read.wait()
            waited = Span(What.WAIT, start_s, time.perf_counter(), "data", Tag.DATA)
            self._settings.counts(waited)
            self._depth.waited(waited.seconds)
        pending.read.wait()  # does not block: releases what the read has borrowed
        if self._settings.refuses_nan:
            self._refuse_nan(pending)
        self._delivery.send(pending.memory)
        self._sent.append(pending.memory)
        self._pending.popleft()  # only now: if sending fails, it is still due

    def _refuse_nan(self, group: _Pending) -> None:
        """Raise for the first NaN of a group, with the file and the row."""
        source = self._source
        epoch, batch = divmod(group.end - group.batches, self._per_epoch)
        for number, (field, data) in enumerate(zip(source.fields, as_fields(group.memory, source.fields), strict=True)):
            at = first_nan_row(data)
            if at is not None:
                row = int(self._order.rows(epoch, batch * self._batch_rows + at, 1)[0])
                place = Layout(source).describe(row, number) if isinstance(source, FileSource) else source.place_of(row)
                raise StorageError(
                    f"NaN in field {field.name!r} of {place}, which nan='error' refuses. Fix the row, or allow NaN "
                    "with nan='allow'."
                )


def _window_bytes(source: FileSource | DecodedSource, order: Order, choice: Choice) -> int:
    """The memory that windows will take; batches get the rest."""
    if choice.mode == "cached":
        return 0
    rows = order.window_rows
    if isinstance(source, DecodedSource):  # whole groups; the first and the last may lie in two windows
        rows = min(source.rows, rows + 2 * max(source.groups))
    return 2 * rows * source.row_bytes
