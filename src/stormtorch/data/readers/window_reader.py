"""Data larger than RAM: prefetches whole windows, and gathers batches from them.

A window's rows are used in random order, so it must be complete before its first batch, and its memory is free only
after its last. The next window is read while one is used. Two windows of memory keep the disk busy without a pause,
because the reader refills a used-up window before it waits for the next one. For the same reason it gathers a batch
that crosses two windows in two parts: the batch must not hold the first window.

Prefetching continues into the next epoch, whose order is known already. A restart elsewhere cancels those reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.errors import OutOfBudget
from ...native.rows.jobs import DONE, FAILED, PENDING, PIECE, RowsJob, RowsPool
from ...native.rows.open import open_rows
from .order import Order, Window
from .permutations import Rows


class Load(ABC):
    """A window in memory, or being loaded."""

    key = (-1, -1)  # its epoch and number
    left = 0  # rows that no job copies yet

    def __init__(self, window: Window) -> None:
        self.window = window
        self.gathers: list[RowsJob] = []  # copies from it that may still run
        self._tables: dict[int, Rows] = {}

    @abstractmethod
    def state(self) -> int:
        """PENDING, DONE or FAILED. Does not block."""

    @abstractmethod
    def wait(self) -> None:
        """Block until it is complete; raises StormError, with the file and the row, if it failed."""

    def addresses(self, field: int) -> Rows:
        """The address of each row of one field, in the order of use. The window must be complete."""
        if field not in self._tables:
            self._tables[field] = self.window.places(*self.runs(field))
        return self._tables[field]

    @abstractmethod
    def runs(self, field: int) -> tuple[Rows, Rows]:
        """For each run of the window, the address of its first row of one field, and the stride."""

    @abstractmethod
    def release(self) -> None:
        """Free its memory for another window; nothing may still read it. Blocks if it is still being loaded."""


class Windows(ABC):
    """Memory for a few windows, and the code that fills it."""

    row_bytes: Sequence[int]  # of each field
    free: list[Any]  # an entry for each window that there is room for

    @abstractmethod
    def load(self, window: Window) -> Load:
        """Start to load a window; there must be room. Raises OutOfBudget."""

    @abstractmethod
    def cancel(self) -> None:
        """Cancel the running loads, so that releasing them is quick. Blocks until nothing writes any more."""

    @abstractmethod
    def close(self) -> None: ...


@dataclass(slots=True)
class _Part:
    """Rows of a batch from one window. ``job``: None until the window is complete."""

    load: Load
    skip: int
    count: int
    at: int  # the first row in the batch
    job: RowsJob | None = None


class WindowRead:
    """As CachedRead; ``ready`` submits work that is ready, too."""

    def __init__(self, reader: WindowReader, parts: list[_Part], targets: Sequence[int], keep: object) -> None:
        self._reader, self._parts, self._targets, self._keep = reader, parts, targets, keep

    def ready(self) -> bool:
        self._reader.refill()
        return all(part.job is not None and self._reader.pool.state(part.job) == DONE for part in self._parts)

    def gather(self) -> bool:
        """Submit the parts whose windows are complete; False if some are not, or failed: ``wait`` raises the reason."""
        for part in self._parts:
            if part.job is None:
                if part.load.state() != DONE:
                    return False
                part.job = self._reader.submit(part, self._targets, self._keep)
        return True

    def wait(self) -> None:
        while not self.gather():
            load = next(part.load for part in self._parts if part.job is None)
            self._reader.release_used(load)  # request the next window before waiting for this one
            load.wait()
        for part in self._parts:
            assert part.job is not None
            state = self._reader.pool.wait(part.job, help=True)
            assert state == DONE, f"a copy in memory ended as {state}"
        self._keep = None
        self._reader.refill()


class WindowReader:
    """As CachedReader, but gathers batches from windows. ``start`` gives None if it must wait for earlier reads."""

    def __init__(self, windows: Windows, order: Order, *, threads: int, used_rows: int) -> None:
        """``used_rows``: the rows of an epoch that are requested; ``drop_last`` may leave some out."""
        self.pool: RowsPool = open_rows(threads)
        self.refused: OutOfBudget | None = None  # the reason of the last None, if it was memory
        self._windows, self._order, self._used_rows = windows, order, used_rows
        self._loads: deque[Load] = deque()  # in the order of use
        self._next = (0, 0)  # the window to load next
        self._ahead: Window | None = None  # that window, once computed
        self._skip = 0  # rows at its beginning that will not be requested
        self._unread: deque[WindowRead] = deque()  # reads with parts that wait for their windows

    def stop(self) -> None:
        self._unread.clear()
        self.pool.cancel()

    def restart(self, epoch: int, first: int) -> None:
        self.stop()
        number, skip = divmod(first, self._order.window_rows)
        while self._loads and self._loads[0].left == 0:
            self._release_first()
        # Keep prefetched windows if this epoch is the next one, and no rows were taken from them.
        head = self._loads[0] if self._loads else None
        if (
            head is None
            or head.key != (epoch, number)
            or head.gathers
            or head.left != self._rows_of(number) - skip
            or any(load.state() == FAILED for load in self._loads)
        ):
            self._drop_all()
            self._next, self._skip, self._ahead = (epoch, number), skip, None
        self.refill()

    def start(self, epoch: int, first: int, count: int, targets: Sequence[int], keep: object) -> WindowRead | None:
        parts: list[_Part] = []
        at = 0
        while at < count:
            window, skip = divmod(first + at, self._order.window_rows)
            load = next((load for load in self._loads if load.key == (epoch, window)), None)
            if load is None:
                return None
            part = min(count - at, self._rows_of(window) - skip)
            parts.append(_Part(load, skip, part, at))
            at += part
        read = WindowRead(self, parts, targets, keep)
        self._unread.append(read)
        self._gather()
        return read

    def submit(self, part: _Part, targets: Sequence[int], keep: object) -> RowsJob:
        """Copy a part's rows to their places."""
        sizes = self._windows.row_bytes
        pieces = np.zeros((len(sizes) * part.count, len(PIECE)), dtype=np.int64)
        for number, (size, target) in enumerate(zip(sizes, targets, strict=True)):
            lines = pieces[number * part.count : (number + 1) * part.count]
            lines[:, 0] = -1
            lines[:, 1] = part.load.addresses(number)[part.skip : part.skip + part.count]
            lines[:, 2] = lines[:, 3] = size
            begin = target + part.at * size
            lines[:, 4] = np.arange(begin, begin + part.count * size, size)
        job = self.pool.submit(pieces, keep)
        part.load.gathers.append(job)
        part.load.left -= part.count
        return job

    def refill(self) -> None:
        """Gather from complete windows, release used-up ones, load the next. Does not block."""
        self._gather()
        self.release_used()

    def release_used(self, before: Load | None = None) -> None:
        """Release used-up windows, and load the next ones. Does not block without ``before``.

        With it, waits for the copies from all windows in front of it, which is quick."""
        while self._loads and self._loads[0].left == 0 and self._loads[0] is not before:
            pending = (self.pool.state(job) == PENDING for job in reversed(self._loads[0].gathers))
            if before is None and any(pending):
                break
            self._release_first()
        self._prefetch()

    def close(self) -> None:
        try:
            self.pool.close()
            self._drop_all()
        finally:
            self._windows.close()

    def _gather(self) -> None:
        while self._unread and self._unread[0].gather():
            self._unread.popleft()

    def _prefetch(self) -> None:
        while self._windows.free:
            epoch, number = self._next
            self._ahead = self._ahead or self._order.window(epoch, number)
            try:
                load = self._windows.load(self._ahead)
            except OutOfBudget as error:
                self.refused = error  # there may be room when the window in use is released
                return
            self.refused = None
            load.key, load.left = self._next, self._rows_of(number) - self._skip
            self._loads.append(load)
            self._skip, self._ahead = 0, None
            self._next = (epoch, number + 1) if self._rows_of(number + 1) > 0 else (epoch + 1, 0)

    def _release_first(self) -> None:
        for job in self._loads[0].gathers:
            self.pool.wait(job)
        self._loads.popleft().release()

    def _drop_all(self) -> None:
        self._windows.cancel()
        while self._loads:
            self._release_first()

    def _rows_of(self, window: int) -> int:
        return min(self._order.window_rows, self._used_rows - window * self._order.window_rows)


def windows_needed(order: Order, batch_rows: int) -> int:
    """One in use and one being read; more if a batch is larger than a window, fewer if there are no more."""
    across = -(-max(0, batch_rows - 1) // order.window_rows) + 1  # windows that one batch may touch
    return max(2, across + (across > 2))
