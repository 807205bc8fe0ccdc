"""One iteration over a reader: prefetches groups of batches, sends them to the device, gives batches in order.

It uses no Python threads. A request for a batch first gives the reading threads the group ``depth`` groups ahead, then
waits for its own group if that is not there yet.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...core.errors import StormError
from ...core.events import Span, What
from ...core.tags import Tag
from ..readers.reader import Read, Reader
from .engine import BatchRange, Counts, Run
from .prefetch_depth import Depth
from .to_device import Delivery, HostGroup


@dataclass(slots=True)
class _Pending:
    """A group that is being read; ``end``: the place of the batch after it."""

    read: Read
    memory: HostGroup
    end: tuple[int, int]
    batches: int
    failed: bool = False


class RowsRun(Run):
    """Gives the batches of a span; reads and sends them in groups."""

    def __init__(
        self,
        span: BatchRange,
        reader: Reader,
        delivery: Delivery,
        depth: Depth,
        counts: Counts,
        *,
        batch_rows: int,
        rows_per_epoch: int,
        window_rows: int,
        group: int,
        check: Callable[[HostGroup, Read], None] | None,
    ) -> None:
        """``group``: the most batches to read and send at once; ``depth`` and ``delivery`` count groups.

        ``check`` raises for a group that was read and is not to be given."""
        self._span, self._reader, self._delivery, self._depth = span, reader, delivery, depth
        self._counts, self._check = counts, check
        self._batch_rows, self._rows_per_epoch, self._window_rows = batch_rows, rows_per_epoch, window_rows
        self._group = group
        self._pending: deque[_Pending] = deque()
        self._sent: deque[object] = deque()
        self._now: object = None  # the group whose batches are being given
        self._left: deque[list[torch.Tensor]] = deque()  # its remaining batches
        self._cursor = span.epoch, span.batch  # the batch to read next
        self._place = span.epoch, span.batch  # the batch to give next
        self._single_until = span.epoch, span.batch  # up to this place, read batches one by one
        self._ramp = 1  # the most batches of the next group: the first batch must not wait for a large group
        self._closed = False
        delivery.reset()
        reader.restart(span.epoch, span.batch * batch_rows)

    def next(self) -> tuple[list[torch.Tensor], int, int] | None:
        if not self._left and not self._take_group():
            return None
        given = self._delivery.own(self._now, self._left.popleft())
        if not self._left:
            self._now = None
        if len(self._left) <= self._group // 2:  # by now the memory of the next group was allocated some steps ago
            self._send_ahead()
        if self._group == 1:
            self._delivery.prepare()
        self._place = self._span.after(*self._place)
        return given, given[0].shape[0], sum(tensor.nbytes for tensor in given)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._now = None
        self._left.clear()
        self._drop()

    def _drop(self) -> None:
        """Cancel everything that is being read or sent."""
        self._reader.stop()
        while self._pending:
            self._delivery.drop(self._pending.popleft().memory)
        while self._sent:
            self._delivery.forget(self._sent.popleft())

    def _take_group(self) -> bool:
        """Make the next group current; False if there are no more."""
        self._prefetch()
        if len(self._pending) >= self._depth.batches and self._pending[-1].read.ready():
            self._depth.saw_full()
        if not self._sent:
            if not self._pending:
                return False
            self._send_first()
        self._now = self._sent.popleft()
        self._left.extend(self._delivery.give(self._now))
        if self._group > 1 and self._pending:
            self._delivery.prepare()
        return True

    def _prefetch(self) -> None:
        if len(self._pending) > self._depth.batches // 2:
            return  # request several at a time: wakes the threads once
        while len(self._pending) < self._depth.batches:
            epoch, batch = self._cursor
            if epoch >= self._span.end_epoch:
                return
            first, batches = batch * self._batch_rows, self._batches_from(batch)
            count = min(batches * self._batch_rows, self._rows_per_epoch - first)
            memory = self._delivery.take(count, block=not self._pending and not self._sent)
            if memory is None:
                return
            read = self._reader.start(epoch, first, count, memory.addresses, memory.fields)
            if read is None:
                self._delivery.drop(memory)
                if not self._pending and not self._sent:
                    assert self._reader.refused is not None, "this read has no earlier one to wait for"
                    raise self._reader.refused
                return
            self._ramp = min(2 * self._ramp, self._group)
            self._cursor = self._span.after(epoch, batch + batches - 1)
            self._pending.append(_Pending(read, memory, self._cursor, batches))

    def _batches_from(self, batch: int) -> int:
        """How many batches to read at once. A group ends with its window: the next one may have no memory yet."""
        if self._cursor < self._single_until:
            return 1
        first = batch * self._batch_rows
        last = first + self._batch_rows - 1  # of the first batch, which may cross windows
        end = last - last % self._window_rows + self._window_rows
        left = min(self._span.per_epoch - batch, (end - first) // self._batch_rows)
        groups = -(-left // self._ramp)
        return -(-left // groups)  # equal sizes: a small group costs as much as a large one

    def _send_first(self) -> None:
        """Wait for the next group and send it. If it cannot be read, give the batches before the bad one first."""
        try:
            self._send(wait=True)
        except StormError:
            failed = self._pending[0]
            if failed.batches == 1:
                raise
            self._drop()
            self._cursor, self._single_until = self._place, failed.end
            self._reader.restart(self._place[0], self._place[1] * self._batch_rows)
            self._prefetch()
            self._send(wait=True)

    def _send_ahead(self) -> None:
        while len(self._sent) < self._delivery.ahead and self._pending:
            first = self._pending[0]
            if first.failed or not first.read.ready():
                return
            try:
                self._send(wait=False)
            except StormError:
                first.failed = True  # the error is raised when the batch is due
                return

    def _send(self, *, wait: bool) -> None:
        pending = self._pending[0]
        if wait:
            ready = pending.read.ready()
            if not ready:
                start_s = time.perf_counter()
                pending.read.wait()
                waited = Span(What.WAIT, start_s, time.perf_counter(), "data", Tag.DATA)
                self._counts(waited)
                self._depth.waited(waited.seconds)
        pending.read.wait()  # does not block: releases what the read has borrowed
        if self._check is not None:
            self._check(pending.memory, pending.read)
        self._sent.append(self._delivery.send(pending.memory))
        self._pending.popleft()  # only now: if sending fails, it is still due
