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
from dataclasses import dataclass, field

import numpy as np

from ...core.errors import OutOfBudget
from ...native.rows.jobs import DONE, PENDING, PIECE, RowsJob, RowsPool
from ...native.rows.open import open_rows
from .order import Order, Window
from .permutations import Rows
from .reader import Read, Reader


class Load(ABC):
    """A window that is being loaded into memory."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether it is complete. Does not block."""

    @abstractmethod
    def wait(self) -> None:
        """Block until it is complete; raises StormError, with the file and the row, if it failed."""

    @abstractmethod
    def failed(self) -> bool:
        """Whether it is known to have failed. Does not block."""

    @abstractmethod
    def addresses(self, field: int) -> Rows:
        """The address of each row of one field, in the order of use. The window must be complete."""

    @abstractmethod
    def release(self) -> None:
        """Free its memory for another window; nothing may still read it. Blocks if it is still being loaded."""


class Windows(ABC):
    """Memory for a few windows, and the code that fills it."""

    row_bytes: Sequence[int]  # of each field

    @abstractmethod
    def has_room(self) -> bool:
        """Whether there is memory for one more window."""

    @abstractmethod
    def load(self, window: Window) -> Load:
        """Start to load a window. There must be room."""

    @abstractmethod
    def cancel(self) -> None:
        """Cancel the running loads, so that releasing them is quick. Blocks until nothing writes any more."""

    @abstractmethod
    def close(self) -> None: ...


@dataclass(eq=False)
class _Resident:
    """A window in memory, or being loaded. ``left``: rows not yet given to the pool."""

    key: tuple[int, int]
    window: Window
    load: Load
    left: int
    gathers: list[RowsJob] = field(default_factory=list)  # copies from it that may still run
    tables: dict[int, Rows] = field(default_factory=dict)

    def addresses(self, number: int) -> Rows:
        """The addresses of one field's rows, in the order of use; the window must be complete."""
        if number not in self.tables:
            self.tables[number] = self.load.addresses(number)
        return self.tables[number]


@dataclass(slots=True)
class _Part:
    """Rows of a batch from one window. ``job``: None until the window is complete."""

    resident: _Resident
    skip: int
    count: int
    at: int  # the first row in the batch
    job: RowsJob | None = None


class WindowRead(Read):
    def __init__(self, reader: WindowReader, parts: list[_Part], targets: Sequence[int], keep: object) -> None:
        self._reader, self._parts, self._targets, self._keep = reader, parts, targets, keep

    @property
    def rows(self) -> Rows:  # type: ignore[override]
        found = [part.resident.window.rows()[part.skip : part.skip + part.count] for part in self._parts]
        return np.concatenate(found)

    def ready(self) -> bool:
        self._reader.refill()
        return all(part.job is not None and self._reader.pool.state(part.job) == DONE for part in self._parts)

    def gather(self) -> bool:
        """Submit the parts whose windows are complete; False if some are not, or failed: ``wait`` raises the reason."""
        for part in self._parts:
            if part.job is None:
                if not part.resident.load.ready():
                    return False
                part.job = self._reader.submit(part, self._targets, self._keep)
        return True

    def wait(self) -> None:
        for part in self._parts:
            if part.job is None:
                self._reader.drain(part.resident)  # request the next window before waiting for this one
                part.resident.load.wait()
                part.job = self._reader.submit(part, self._targets, self._keep)
        for part in self._parts:
            assert part.job is not None
            state = self._reader.pool.wait(part.job, help=True)
            assert state == DONE, f"a copy in memory ended as {state}"
        self._keep = None
        self._reader.refill()


class WindowReader(Reader):
    """Gathers batches from windows."""

    def __init__(self, windows: Windows, order: Order, *, threads: int, used_rows: int) -> None:
        """``used_rows``: the rows of an epoch that are requested; ``drop_last`` may leave some out."""
        self.pool: RowsPool = open_rows(threads)
        self._windows, self._order, self._used_rows = windows, order, used_rows
        self._resident: deque[_Resident] = deque()
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
        while self._resident and self._resident[0].left == 0:
            self._resident.popleft().load.release()
        # Keep prefetched windows if this epoch is the next one, and no rows were taken from them.
        head = self._resident[0] if self._resident else None
        if (
            head is None
            or head.key != (epoch, number)
            or head.gathers
            or head.left != self._rows_of(number) - skip
            or any(resident.load.failed() for resident in self._resident)
        ):
            self._drop_all()
            self._next, self._skip, self._ahead = (epoch, number), skip, None
        self.refill()

    def start(self, epoch: int, first: int, count: int, targets: Sequence[int], keep: object) -> Read | None:
        parts: list[_Part] = []
        at = 0
        while at < count:
            window, skip = divmod(first + at, self._order.window_rows)
            resident = self._find((epoch, window))
            if resident is None:
                return None
            part = min(count - at, self._rows_of(window) - skip)
            parts.append(_Part(resident, skip, part, at))
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
            lines[:, 1] = part.resident.addresses(number)[part.skip : part.skip + part.count]
            lines[:, 2] = lines[:, 3] = size
            begin = target + part.at * size
            lines[:, 4] = np.arange(begin, begin + part.count * size, size)
        job = self.pool.submit(pieces, keep)
        part.resident.gathers.append(job)
        part.resident.left -= part.count
        return job

    def refill(self) -> None:
        """Gather from complete windows, release used-up ones, load the next. Does not block."""
        self._gather()
        while self._resident and self._is_used_up(self._resident[0]):
            self._resident.popleft().load.release()
        self._prefetch()

    def _gather(self) -> None:
        while self._unread and self._unread[0].gather():
            self._unread.popleft()

    def drain(self, before: _Resident | None) -> None:
        """Wait for copies from used-up windows up to ``before``, which is quick; prefetch."""
        while self._resident and self._resident[0] is not before and self._resident[0].left == 0:
            for job in self._resident[0].gathers:
                self.pool.wait(job)
            self._resident.popleft().load.release()
        self._prefetch()

    def close(self) -> None:
        try:
            self.pool.close()
            self._drop_all()
        finally:
            self._windows.close()

    def _prefetch(self) -> None:
        while self._windows.has_room():
            epoch, number = self._next
            self._ahead = self._ahead or self._order.window(epoch, number)
            try:
                load = self._windows.load(self._ahead)
            except OutOfBudget as error:
                self.refused = error  # there may be room when the window in use is released
                return
            self.refused = None
            left = self._rows_of(number) - self._skip
            self._resident.append(_Resident((epoch, number), self._ahead, load, left))
            self._skip, self._ahead = 0, None
            self._next = (epoch, number + 1) if self._rows_of(number + 1) > 0 else (epoch + 1, 0)

    def _find(self, key: tuple[int, int]) -> _Resident | None:
        return next((resident for resident in self._resident if resident.key == key), None)

    def _is_used_up(self, resident: _Resident) -> bool:
        if resident.left > 0:
            return False
        resident.gathers = [job for job in resident.gathers if self.pool.state(job) == PENDING]
        return not resident.gathers

    def _drop_all(self) -> None:
        self._windows.cancel()
        while self._resident:
            resident = self._resident.popleft()
            for job in resident.gathers:
                self.pool.wait(job)
            resident.load.release()

    def _rows_of(self, window: int) -> int:
        return min(self._order.window_rows, self._used_rows - window * self._order.window_rows)


def windows_needed(order: Order, batch_rows: int) -> int:
    """One in use and one being read; more if a batch is larger than a window, fewer if there are no more."""
    across = -(-max(0, batch_rows - 1) // order.window_rows) + 1  # windows that one batch may touch
    return max(2, across + (across > 2))
