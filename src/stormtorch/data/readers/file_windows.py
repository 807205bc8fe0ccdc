"""Windows of files: the blocks of a window are read with direct I/O, several at once, into memory that is used again.

A direct read begins and ends at multiples of 4096 bytes. Each run of rows is therefore read as the whole sectors that
cover it, to a place of its own; where its rows lie follows from where it begins in the first sector. Fields that lie in
one file with the same stride, side by side in each record, are covered by one read; such fields are a *group*.

What the disk sees is meant to be what plain reads would ask of it: at any time as many blocks, whatever the number of
groups, into memory that is small. Windows are not; so where the CPU has time for one more copy, threads read through
stages (csrc/rows.c). It has where a GPU computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...core.errors import OutOfBudget, StormError
from ...core.sizes import MiB, format_bytes, round_up
from ...core.tags import Tag, Tier
from ...memory.books.ledger import Ledger, Reservation
from ...memory.disk.files import ALIGNMENT
from ...memory.host.arena import HostArena
from ...native.rows import DONE, FAILED, PENDING, PIECE, Failure, RowsJob, open_rows
from ..source import FileSource
from .descriptors import CannotOpen, Descriptors
from .layout import Layout
from .order import Order, Window
from .permutations import Rows
from .window_reader import Load, Windows

READ_THREADS = 8  # blocks in flight: what a fast SSD needs to be busy, and what a slow disk does not mind
_MOST_THREADS = 64  # a block is one read for each group of fields
_STAGE_BYTES = 1 * MiB  # of a thread: half a block, see csrc/rows.c


@dataclass(frozen=True, slots=True)
class _Group:
    """Fields that are read together: the first of them in the file, and how far behind it the last one ends."""

    fields: tuple[int, ...]
    first: int
    span: int


class FileWindows(Windows):
    """Memory for ``count`` windows of ``source``; charged before it is mapped."""

    mode = "direct"

    def __init__(
        self,
        source: FileSource,
        order: Order,
        *,
        ledger: Ledger,
        count: int,
        direct: bool,
        staged: bool,
        reason: str,
    ) -> None:
        """``staged``: the CPU has the time to copy everything once more, for the sake of the disk."""
        self.layout, self.reason = Layout(source), reason
        self.row_bytes = [column.row_bytes for column in self.layout.columns]
        self._groups = _groups(self.layout)
        self.descriptors = Descriptors(self.layout.files, direct=direct)
        self.window_bytes = self._most_bytes(order)
        self._check_room(ledger, order, count)
        self._arenas = [HostArena(self.window_bytes, ledger=ledger, tag=Tag.DATA) for _ in range(count)]
        self.free = [arena.tensor((self.window_bytes,), torch.uint8, alignment=ALIGNMENT) for arena in self._arenas]
        # Else a read of a few labels would have the place of a block of images, for as long: queues are served in turn.
        threads = min(READ_THREADS * len(self._groups), _MOST_THREADS)
        self._stages = self._reserve_stages(ledger, threads * _STAGE_BYTES) if direct and staged else None
        self.pool = open_rows(threads, stage_bytes=_STAGE_BYTES if self._stages else 0)

    def has_room(self) -> bool:
        return bool(self.free)

    def load(self, window: Window) -> Load:
        memory = self.free.pop()
        try:
            return _FileLoad(self, window, memory)
        except BaseException:
            self.free.append(memory)
            raise

    def cancel(self) -> None:
        self.pool.cancel()

    def close(self) -> None:
        self.pool.close()
        self.descriptors.close()
        self.free.clear()
        for arena in self._arenas:
            arena.close()
        if self._stages is not None:
            self._stages.release()

    def _most_bytes(self, order: Order) -> int:
        """What the largest possible window takes: its rows, and for each run the rest of two sectors."""
        rows, runs = min(order.window_rows, order.rows_per_epoch), order.most_runs()
        total = 0
        for group in self._groups:
            stride = int(self.layout.columns[group.first].strides.max())
            total += rows * stride + runs * (2 * ALIGNMENT + max(0, group.span - stride))
        return round_up(total, ALIGNMENT)

    def _reserve_stages(self, ledger: Ledger, size: int) -> Reservation | None:
        """None where windows are so small that they are in the CPU's caches themselves, or nothing is left."""
        if 8 * size > sum(arena.capacity_bytes for arena in self._arenas):
            return None
        try:
            return ledger.reserve(Tier.HOST, Tag.DATA, size)
        except OutOfBudget:
            return None

    def _check_room(self, ledger: Ledger, order: Order, count: int) -> None:
        free = ledger.free_bytes(Tier.HOST)
        if count * self.window_bytes <= free:
            return
        budget = ledger.budgets[Tier.HOST]
        rows = min(order.window_rows, order.rows_per_epoch)
        fits = int(0.95 * rows * sum(self.row_bytes) * free / (count * self.window_bytes))
        raise OutOfBudget(
            f"Cannot take {format_bytes(count * self.window_bytes)} of RAM to read {self.layout.source.name} with",
            f"{count} windows of {format_bytes(self.window_bytes)}, {format_bytes(free)} left",
            f"The limit is {budget.given}{f' ({budget.reason})' if budget.reason else ''}.",
            f"Raise it, or shuffle in smaller windows: window='{max(1, fits >> 20)}MiB' would fit.",
        )


class _FileLoad(Load):
    def __init__(self, windows: FileWindows, window: Window, memory: torch.Tensor) -> None:
        self._windows, self._window, self._memory = windows, window, memory
        layout = windows.layout
        self._shards = layout.shards_of(window.firsts)
        self._bases: list[Rows] = []  # by group: the address of the first row of each run
        inside = window.firsts - layout.starts[self._shards]
        lines = []
        address = memory.data_ptr()
        self._files: list[int] = []
        for group in windows._groups:
            column = layout.columns[group.first]
            begin = column.offsets[self._shards] + inside * column.strides[self._shards]
            end = begin + (window.counts - 1) * column.strides[self._shards] + group.span
            low = begin - begin % ALIGNMENT
            high = end + -end % ALIGNMENT
            places = address + np.cumsum(high - low) - (high - low)
            address += int((high - low).sum())
            self._bases.append(places + (begin - low))
            unmapped = np.zeros_like(low)
            lines.append(np.stack([column.files[self._shards], low, high - low, end - low, places, unmapped], axis=1))
        assert address - memory.data_ptr() <= memory.nbytes, "a window is larger than the largest"
        # Runs of all groups in the order of the runs: neighbours on the disk are read one after the other.
        pieces = np.stack(lines, axis=1).reshape(-1, len(PIECE))
        self._job: RowsJob | None = None
        self._failed: StormError | None = None  # it fails when it is wanted: what comes before is still good
        files = np.unique(pieces[:, 0]).tolist()
        try:
            lent = windows.descriptors.lend(files)
        except CannotOpen as error:
            self._failed = layout.open_error(window.firsts, error.file, error.cause)
            return
        if lent is None:
            raise OutOfBudget(
                f"Cannot open {len(files)} files for a window of {layout.source.name}",
                f"{windows.descriptors.limit} may be open, and those of the window before are still read",
                "The limit is half of ulimit -n.",
                "Raise it, or `storm data pack` the data into fewer files.",
            )
        self._files = files
        pieces[:, 0] = np.asarray([file.fd for file in lent])[np.searchsorted(files, pieces[:, 0])]
        self._job = windows.pool.submit(np.ascontiguousarray(pieces), memory)

    def ready(self) -> bool:
        if self._job is None or self._windows.pool.state(self._job) != DONE:
            return False
        self._give_back_files()
        return True

    def wait(self) -> None:
        if self._failed is not None:
            raise self._failed
        assert self._job is not None
        state = self._windows.pool.wait(self._job)
        self._give_back_files()
        if state == FAILED:
            raise self._error(self._job.failure())
        assert state == DONE, "a window that was dropped is not waited for"

    def failed(self) -> bool:
        return self._job is None or self._windows.pool.state(self._job) not in (PENDING, DONE)

    def addresses(self, field: int) -> Rows:
        windows, window = self._windows, self._window
        at = next(number for number, group in enumerate(windows._groups) if field in group.fields)
        column, first = windows.layout.columns[field], windows.layout.columns[windows._groups[at].first]
        base = self._bases[at] + column.offsets[self._shards] - first.offsets[self._shards]
        starts = np.cumsum(window.counts) - window.counts
        strides = column.strides[self._shards]
        number = np.arange(int(window.counts.sum()), dtype=np.int64)
        number -= np.repeat(starts, window.counts)
        number *= np.repeat(strides, window.counts)
        natural: Rows = number + np.repeat(base, window.counts)
        return natural if window.mixed is None else natural[window.mixed]

    def release(self) -> None:
        if self._job is not None:
            self._windows.pool.wait(self._job)
        self._give_back_files()
        self._windows.free.append(self._memory)

    def _give_back_files(self) -> None:
        """The job is over."""
        files, self._files = self._files, []
        self._windows.descriptors.give_back(files)

    def _error(self, failure: Failure) -> StormError:
        layout = self._windows.layout
        run, at = divmod(failure.piece, len(self._windows._groups))
        group = self._windows._groups[at]
        shard, first = int(self._shards[run]), int(self._window.firsts[run])
        column = layout.columns[group.first]
        begin = int(column.offsets[shard]) + (first - int(layout.starts[shard])) * int(column.strides[shard])
        there = max(0, failure.got - begin % ALIGNMENT)  # bytes of rows that did come
        whole = 0 if there < group.span else (there - group.span) // int(column.strides[shard]) + 1
        row = first + min(whole, int(self._window.counts[run]) - 1)
        return layout.read_error(row, group.fields[-1], failure.error)


def _groups(layout: Layout) -> Sequence[_Group]:
    """Fields in one file with one stride, all within one stride, in every shard; the others by themselves."""
    groups: list[list[int]] = []
    for number, column in enumerate(layout.columns):
        for group in groups:
            first = layout.columns[group[0]]
            distance = column.offsets - first.offsets
            if (
                (column.files == first.files).all()
                and (column.strides == first.strides).all()
                and (distance == distance[0]).all()
                and abs(int(distance[0])) < int(first.strides[0])
            ):
                group.append(number)
                break
        else:
            groups.append([number])
    found = []
    for members in groups:
        members.sort(key=lambda number: int(layout.columns[number].offsets[0]))
        first, last = layout.columns[members[0]], layout.columns[members[-1]]
        ends = [int(layout.columns[n].offsets[0] - first.offsets[0]) + layout.columns[n].row_bytes for n in members]
        found.append(_Group(tuple(members), members[0], max(ends)))
        assert last.row_bytes > 0
    return found
