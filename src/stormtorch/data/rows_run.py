"""Batches out of a reader: read ahead, sent ahead, given in order.

No thread of Python's takes part. The call that asks for a batch first hands the reading threads what comes ``depth``
batches later, then waits, if it must, for its own.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

from .delivery import Delivery, HostBatch
from .depth import Depth
from .nan import NanCheck
from .reader import Read, Reader
from .run import Counts, Run, Span


@dataclass(slots=True)
class _Pending:
    read: Read
    memory: HostBatch


class RowsRun(Run):
    """Batches out of a reader."""

    def __init__(
        self,
        span: Span,
        reader: Reader,
        delivery: Delivery,
        depth: Depth,
        counts: Counts,
        *,
        batch_rows: int,
        rows_per_epoch: int,
        check: NanCheck | None,
    ) -> None:
        self._span, self._reader, self._delivery, self._depth = span, reader, delivery, depth
        self._counts, self._check = counts, check
        self._batch_rows, self._rows_per_epoch = batch_rows, rows_per_epoch
        self._pending: deque[_Pending] = deque()
        self._sent: deque[tuple[object, int]] = deque()
        self._cursor = span.epoch, span.batch
        self._closed = False
        delivery.reset()
        reader.restart(span.epoch, span.batch * batch_rows)

    def next(self) -> list[torch.Tensor] | None:
        delivery = self._delivery
        self._read_ahead()
        if len(self._pending) >= self._depth.batches and self._pending[-1].read.ready():
            self._depth.saw_full()
        if not self._sent:
            if not self._pending:
                return None
            self._send(wait=True)
        sent, size = self._sent.popleft()
        given = delivery.give(sent)
        while len(self._sent) < delivery.ahead and self._pending and self._pending[0].read.ready():
            self._send(wait=False)
        delivery.prepare()
        self._counts.bytes += size
        self._counts.samples += given[0].shape[0]
        return given

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._reader.stop()
        while self._pending:
            self._delivery.drop(self._pending.popleft().memory)
        while self._sent:
            self._delivery.give(self._sent.popleft()[0])  # so that the user's stream frees them behind their copies

    def _read_ahead(self) -> None:
        if len(self._pending) > self._depth.batches // 2:
            return  # several at a time: threads are woken once, and this code finds itself in the CPU's caches
        while len(self._pending) < self._depth.batches:
            epoch, batch = self._cursor
            if epoch >= self._span.end_epoch:
                return
            first = batch * self._batch_rows
            count = min(self._batch_rows, self._rows_per_epoch - first)
            memory = self._delivery.take(count, block=not self._pending and not self._sent)
            if memory is None:
                return
            read = self._reader.start(epoch, first, count, memory.addresses, memory.fields)
            if read is None:
                assert self._pending or self._sent, "nothing is on its way that this read could wait for"
                self._delivery.drop(memory)
                return
            self._pending.append(_Pending(read, memory))
            self._cursor = self._span.after(epoch, batch)

    def _send(self, *, wait: bool) -> None:
        pending = self._pending[0]
        if wait:
            ready = pending.read.ready()
            if not ready:
                begin = time.perf_counter()
                pending.read.wait()
                waited = time.perf_counter() - begin
                self._counts.waited_s += waited
                self._depth.waited(waited)
        pending.read.wait()  # at once: settles what the read has lent
        if self._check is not None:
            self._check(pending.memory, pending.read)
        self._pending.popleft()
        size = sum(field.nbytes for field in pending.memory.fields)
        self._sent.append((self._delivery.send(pending.memory), size))
