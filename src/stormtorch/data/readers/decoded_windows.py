"""Windows of rows that must be decoded: a few threads decode whole groups, each once.

These are Python threads; Parquet's decoder releases the GIL. A group that crosses two windows remains until both are
used up.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from torch import Tensor

from ...core.errors import OutOfBudget
from ...core.sizes import format_bytes
from ...core.tags import Tag, Tier
from ...memory.books.ledger import Ledger, Reservation
from ...native.rows.jobs import DONE, FAILED, PENDING
from ..source import DecodedSource
from .order import Window
from .permutations import Rows
from .window_reader import Load, Windows

_TICK_S = 0.2  # Ctrl-C can interrupt a wait for a thread only between slices


class _Group:
    """One group of rows, decoded or being decoded, and how many windows need it."""

    def __init__(self, rows: Future[Mapping[str, Tensor]], charge: Reservation) -> None:
        self.rows, self.charge, self.users = rows, charge, 0

    def state(self) -> int:
        if not self.rows.done():
            return PENDING
        return FAILED if self.rows.cancelled() or self.rows.exception() is not None else DONE


class DecodedWindows(Windows):
    """Up to ``count`` windows of ``source``; charges each group before decoding it."""

    def __init__(self, source: DecodedSource, *, ledger: Ledger, count: int, threads: int) -> None:
        self.source, self._ledger, self.free = source, ledger, [None] * count
        self.row_bytes = [field.row_bytes for field in source.fields]
        self.ends = np.cumsum(np.asarray(source.groups, dtype=np.int64))
        self.groups: dict[int, _Group] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="storm-decode")

    def load(self, window: Window) -> Load:
        load = _DecodedLoad(self, window)
        self.free.pop()
        try:
            for number in dict.fromkeys(load.numbers.tolist()):
                load.groups[number] = self._need(number)
                load.groups[number].users += 1
        except BaseException:
            load.release()
            raise
        return load

    def cancel(self) -> None:
        rows = [group.rows for group in self.groups.values()]
        for one in rows:
            one.cancel()
        while wait(rows, timeout=_TICK_S).not_done:
            pass

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for group in self.groups.values():
            group.charge.release()
        self.groups.clear()

    def _need(self, number: int) -> _Group:
        if number not in self.groups:
            size = int(self.source.groups[number]) * self.source.row_bytes
            free = self._ledger.free_bytes(Tier.HOST)
            try:
                charge = self._ledger.reserve(Tier.HOST, Tag.DATA, size)
            except OutOfBudget as error:
                raise OutOfBudget(
                    f"Cannot take {format_bytes(size)} of RAM to decode group {number} of {self.source.name}",
                    f"{format_bytes(max(0, free))} left of the budget, {self.source.groups[number]} rows in the group",
                    error.limit,
                    "Raise it, give a smaller window=, or `storm data pack` the data.",
                ) from error
            self.groups[number] = _Group(self._pool.submit(self.source.decode, number), charge)
        return self.groups[number]


class _DecodedLoad(Load):
    def __init__(self, windows: DecodedWindows, window: Window) -> None:
        super().__init__(window)
        self._windows = windows
        self.numbers: Rows = np.searchsorted(windows.ends, window.firsts, side="right")  # the group of each run
        self.groups: dict[int, _Group] = {}

    def state(self) -> int:
        states = {group.state() for group in self.groups.values()}
        return next((state for state in (FAILED, PENDING) if state in states), DONE)

    def wait(self) -> None:
        for group in self.groups.values():
            while not group.rows.done():
                wait([group.rows], timeout=_TICK_S)
            group.rows.result()  # raises the decoder's error

    def runs(self, field: int) -> tuple[Rows, Rows]:
        source, size = self._windows.source, self._windows.row_bytes[field]
        bases = np.zeros(len(source.groups), dtype=np.int64)
        for number, group in self.groups.items():
            tensor = group.rows.result()[source.fields[field].name]
            assert tensor.is_contiguous(), field
            assert tensor.nbytes == source.groups[number] * size, field
            bases[number] = tensor.data_ptr() - int(self._windows.ends[number] - source.groups[number]) * size
        return bases[self.numbers] + self.window.firsts * size, np.full_like(self.window.counts, size)

    def release(self) -> None:
        while self.groups:
            number, group = self.groups.popitem()
            group.users -= 1
            if group.users == 0:
                if not group.rows.cancel():
                    wait([group.rows])
                del self._windows.groups[number]
                group.charge.release()
        self._windows.free.append(None)
