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
from ..source import DecodedSource
from .order import Window
from .permutations import Rows
from .window_reader import Load, Windows

_TICK_S = 0.2  # Ctrl-C can interrupt a wait for a thread only between slices


class _Group:
    """One group of rows, decoded or being decoded, and how many windows need it."""

    def __init__(self, rows: Future[Mapping[str, Tensor]], charge: Reservation) -> None:
        self.rows, self.charge, self.users = rows, charge, 0


class DecodedWindows(Windows):
    """Up to ``count`` windows of ``source``; charges each group before decoding it."""

    def __init__(self, source: DecodedSource, *, ledger: Ledger, count: int, threads: int) -> None:
        self.source, self._ledger, self.room = source, ledger, count
        self.row_bytes = [field.row_bytes for field in source.fields]
        self.ends = np.cumsum(np.asarray(source.groups, dtype=np.int64))
        self.starts = self.ends - np.asarray(source.groups, dtype=np.int64)
        self._groups: dict[int, _Group] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="storm-decode")

    def has_room(self) -> bool:
        return self.room > 0

    def load(self, window: Window) -> Load:
        numbers = np.searchsorted(self.ends, window.firsts, side="right")
        load = _DecodedLoad(self, window, numbers)
        try:
            for number in load.needed:
                self._need(number)
                load.held.append(number)
        except BaseException:
            self.let_go(load.held)
            raise
        self.room -= 1
        return load

    def group(self, number: int) -> Mapping[str, Tensor]:
        """The rows of a group; blocks until they are decoded, raises the decoder's error."""
        rows = self._groups[number].rows
        while not rows.done():
            wait([rows], timeout=_TICK_S)
        return rows.result()

    def is_there(self, number: int) -> bool:
        rows = self._groups[number].rows
        return rows.done() and not rows.cancelled() and rows.exception() is None

    def is_lost(self, number: int) -> bool:
        rows = self._groups[number].rows
        return rows.cancelled() or (rows.done() and rows.exception() is not None)

    def let_go(self, numbers: list[int]) -> None:
        """Release these groups for one window; free those that no window needs."""
        while numbers:
            group = self._groups[numbers[-1]]
            group.users -= 1
            if group.users == 0:
                if not group.rows.cancel():
                    wait([group.rows])
                del self._groups[numbers[-1]]
                group.charge.release()
            numbers.pop()

    def cancel(self) -> None:
        rows = [group.rows for group in self._groups.values()]
        for one in rows:
            one.cancel()
        while wait(rows, timeout=_TICK_S).not_done:
            pass

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for group in self._groups.values():
            group.charge.release()
        self._groups.clear()

    def _need(self, number: int) -> None:
        if number not in self._groups:
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
            self._groups[number] = _Group(self._pool.submit(self.source.decode, number), charge)
        self._groups[number].users += 1


class _DecodedLoad(Load):
    def __init__(self, windows: DecodedWindows, window: Window, numbers: Rows) -> None:
        self._windows, self._window, self._numbers = windows, window, numbers
        self.needed: list[int] = list(dict.fromkeys(numbers.tolist()))
        self.held: list[int] = []

    def ready(self) -> bool:
        return all(self._windows.is_there(number) for number in self.needed)

    def wait(self) -> None:
        for number in self.needed:
            self._windows.group(number)

    def failed(self) -> bool:
        return any(self._windows.is_lost(number) for number in self.needed)

    def addresses(self, field: int) -> Rows:
        windows, window = self._windows, self._window
        name, size = windows.source.fields[field].name, windows.row_bytes[field]
        bases = {}
        for number in self.needed:
            tensor = windows.group(number)[name]
            assert tensor.is_contiguous(), name
            assert tensor.nbytes == windows.source.groups[number] * size, name
            bases[number] = tensor.data_ptr()
        firsts = np.asarray([bases[number] for number in self._numbers.tolist()], dtype=np.int64)
        firsts += (window.firsts - windows.starts[self._numbers]) * size
        return window.places(firsts, np.full_like(window.counts, size))

    def release(self) -> None:
        self._windows.let_go(self.held)
        self._windows.room += 1
