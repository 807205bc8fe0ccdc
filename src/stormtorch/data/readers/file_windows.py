"""Windows of files: reads the blocks of a window with direct I/O, several at once, into memory that is used again.

A direct read begins and ends at multiples of 4096 bytes. So each run of rows is read as the sectors that cover it, to
its own place; its offset in the first sector tells where its rows lie. One read covers fields of one file with the same
stride, side by side in each record; such fields are a *group*.

The disk should see as many blocks in flight as with plain reads, for any number of groups, into a small memory. Windows
are large. So if the CPU has time for one more copy, as when a GPU computes, threads read through staging buffers
(csrc/rows.c).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch

from ...core.errors import OutOfBudget
from ...core.sizes import MiB, format_bytes, round_up
from ...core.tags import Tag, Tier
from ...memory.books.ledger import Ledger, Reservation
from ...memory.disk.files import ALIGNMENT
from ...memory.host.arena import HostArena
from ...native.rows.jobs import DONE, FAILED, PENDING, PIECE, Failure
from ...native.rows.open import open_rows
from ..source import FileSource
from .descriptors import Descriptors
from .layout import Layout
from .order import Order, Window
from .permutations import Rows
from .window_reader import Load, Windows

READ_THREADS = 8  # blocks in flight: enough for a fast SSD, not too many for a slow disk
_MAX_THREADS = 64  # a block is one read for each group of fields
_STAGE_BYTES = 1 * MiB  # per thread: half a block, see csrc/rows.c


@dataclass(slots=True)
class _Group:
    """Fields that are read together, in the order of their bytes, and the distance from the first to the last's end."""

    fields: list[int]
    span: int


class FileWindows(Windows):
    """Memory for ``count`` windows of ``source``, charged before it is mapped."""

    def __init__(
        self, source: FileSource, order: Order, *, ledger: Ledger, count: int, direct: bool, staged: bool
    ) -> None:
        """``staged``: the CPU has time for one more copy, which makes the disk faster."""
        self.layout = Layout(source)
        self.row_bytes = [column.row_bytes for column in self.layout.columns]
        self.groups = _groups(self.layout)
        self.descriptors = Descriptors(self.layout.files, direct=direct)
        self.window_bytes = self._most_bytes(order)
        try:
            self._arena = HostArena([self.window_bytes] * count, ledger=ledger, tag=Tag.DATA)
        except OutOfBudget as error:
            free = ledger.free_bytes(Tier.HOST)
            rows = min(order.window_rows, order.rows_per_epoch)
            fits = int(0.95 * rows * source.row_bytes * free / (count * self.window_bytes))
            raise OutOfBudget(
                f"Cannot take {format_bytes(count * self.window_bytes)} of RAM to read {source.name} with",
                f"{count} windows of {format_bytes(self.window_bytes)}, {format_bytes(free)} left",
                error.limit,
                f"Raise it, or shuffle in smaller windows: window='{max(1, fits >> 20)}MiB' would fit.",
            ) from error
        self.free = [self._arena.tensor((self.window_bytes,), torch.uint8, alignment=ALIGNMENT) for _ in range(count)]
        # Per group: otherwise a read of a few labels would occupy the thread of a block of images.
        threads = min(READ_THREADS * len(self.groups), _MAX_THREADS)
        self._stages = self._reserve_stages(ledger, threads * _STAGE_BYTES) if direct and staged else None
        self.pool = open_rows(threads, stage_bytes=_STAGE_BYTES if self._stages else 0)

    def load(self, window: Window) -> Load:
        load = _FileLoad(self, window, self.free[-1])
        self.free.pop()
        return load

    def cancel(self) -> None:
        self.pool.cancel()

    def close(self) -> None:
        self.pool.close()
        self.descriptors.close()
        self.free.clear()
        self._arena.close()
        if self._stages is not None:
            self._stages.release()

    def _most_bytes(self, order: Order) -> int:
        """The memory of the largest possible window: its rows, and for each run the rest of two sectors."""
        rows, runs = min(order.window_rows, order.rows_per_epoch), order.most_runs()
        total = 0
        for group in self.groups:
            stride = int(self.layout.columns[group.fields[0]].strides.max())
            total += rows * stride + runs * (2 * ALIGNMENT + max(0, group.span - stride))
        return round_up(total, ALIGNMENT)

    def _reserve_stages(self, ledger: Ledger, size: int) -> Reservation | None:
        """None if windows are so small that they fit in the CPU's caches, or if the budget has no room."""
        if 8 * size > self._arena.capacity_bytes:
            return None
        try:
            return ledger.reserve(Tier.HOST, Tag.DATA, size)
        except OutOfBudget:
            return None


class _FileLoad(Load):
    def __init__(self, windows: FileWindows, window: Window, memory: torch.Tensor) -> None:
        super().__init__(window)
        self._windows, self._memory = windows, memory
        layout, descriptors = windows.layout, windows.descriptors
        self._shards = layout.shards_of(window.firsts)
        self._bases: list[Rows] = []  # by group: the address of the first row of each run
        lines = []
        address = memory.data_ptr()
        for group in windows.groups:
            column = layout.columns[group.fields[0]]
            files = column.files[self._shards]
            descriptors.open(files)
            begin = layout.begins(window.firsts, self._shards, column)
            end = begin + (window.counts - 1) * column.strides[self._shards] + group.span
            low = begin - begin % ALIGNMENT
            high = end + -end % ALIGNMENT
            places = address + np.cumsum(high - low) - (high - low)
            address += int((high - low).sum())
            self._bases.append(places + (begin - low))
            unmapped = np.zeros_like(low)
            lines.append(np.stack([descriptors.fds[files], low, high - low, end - low, places, unmapped], axis=1))
        assert address - memory.data_ptr() <= memory.nbytes, "a window exceeds the largest size"
        # By run, then by group: neighbours on the disk are read one after another.
        pieces = np.ascontiguousarray(np.stack(lines, axis=1).reshape(-1, len(PIECE)))
        self._job = windows.pool.submit(pieces, memory)

    def state(self) -> int:
        state = self._windows.pool.state(self._job)
        return state if state in (PENDING, DONE) else FAILED

    def wait(self) -> None:
        state = self._windows.pool.wait(self._job)
        if state == FAILED:
            self._raise_error(self._job.failure())
        assert state == DONE, "waited for a cancelled window"

    def runs(self, field: int) -> tuple[Rows, Rows]:
        layout, groups = self._windows.layout, self._windows.groups
        at = next(number for number, group in enumerate(groups) if field in group.fields)
        column, first = layout.columns[field], layout.columns[groups[at].fields[0]]
        bases = self._bases[at] + column.offsets[self._shards] - first.offsets[self._shards]
        return bases, column.strides[self._shards]

    def release(self) -> None:
        self._windows.pool.wait(self._job)
        self._windows.free.append(self._memory)

    def _raise_error(self, failure: Failure) -> NoReturn:
        layout, window = self._windows.layout, self.window
        run, at = divmod(failure.piece, len(self._windows.groups))
        group = self._windows.groups[at]
        column, shard = layout.columns[group.fields[0]], int(self._shards[run])
        begin = int(layout.begins(window.firsts, self._shards, column)[run])
        there = max(0, failure.got - begin % ALIGNMENT)  # bytes of rows that were read
        whole = 0 if there < group.span else (there - group.span) // int(column.strides[shard]) + 1
        row = int(window.firsts[run]) + min(whole, int(window.counts[run]) - 1)
        layout.raise_error(row, group.fields[-1], failure.error, self._windows.descriptors.errors)


def _groups(layout: Layout) -> list[_Group]:
    """Group fields that lie in one file with one stride, within one stride, in every shard; other fields are alone."""

    def places(number: int) -> tuple[bytes, bytes, bytes, int]:
        column = layout.columns[number]
        first = int(column.offsets[0])
        return column.files.tobytes(), column.strides.tobytes(), (column.offsets - first).tobytes(), first

    groups: list[_Group] = []
    for number in sorted(range(len(layout.columns)), key=places):
        column = layout.columns[number]
        if groups:
            first = layout.columns[groups[-1].fields[0]]
            distance = int(column.offsets[0] - first.offsets[0])
            if places(number)[:3] == places(groups[-1].fields[0])[:3] and distance < int(first.strides[0]):
                groups[-1].fields.append(number)
                groups[-1].span = max(groups[-1].span, distance + column.row_bytes)
                continue
        groups.append(_Group([number], column.row_bytes))
    return groups
