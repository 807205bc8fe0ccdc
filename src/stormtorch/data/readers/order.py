"""The order of rows: a pure function of seed, epoch and the data's layout. Reads no data and keeps no state.

A shuffled epoch is made in four steps:

1. Cut every shard into *blocks*, runs of consecutive rows of about 2 MiB.
2. Permute the blocks of all shards. Their rows, one block after another, are the epoch's *line*.
3. Give each rank an equal, consecutive part of the line.
4. Cut the part into *windows* of equal size, at most 256 MiB, and permute the rows of each window.

The disk reads whole blocks, one window ahead, at the rate of large reads. Data no larger than a window is shuffled
fully. The order depends on the number of rows, the sizes of shards and rows, and the settings, not on how the bytes are
read, so a run can resume on another machine.

How close that is to uniform. The place of each row in the epoch *is* uniform, because its block's place is: the mean
of ``|place - row| / rows`` is 1/3, as for a full shuffle. Neighbours are not independent: two rows that are neighbours
in the file mostly lie in the same window, and so are in one batch with probability ``(batch - 1) / (window - 1)``
instead of ``(batch - 1) / (rows - 1)``. With windows of 21,000 rows (of 12 KiB each) and batches of 128 that is 0.6 %.
``tests/data/test_order.py`` measures both. If that matters, ``shuffle="full"`` places every row independently, with
random reads, which only data in RAM can afford.

Memory: 16 bytes per block, 8 MiB per TiB of data, and the rows of one window at a time. The road not taken: an array
with a permutation of all rows. 8 bytes per row are gigabytes for billions of rows, in every worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...core.errors import SettingError
from ...core.sizes import MiB
from .permutations import Rows, mix, permutation, scatter

Shuffle = bool | Literal["full"]
BLOCK_BYTES = 2 * MiB
WINDOW_BYTES = 256 * MiB
_PLAIN_WINDOW_BYTES = 32 * MiB  # without shuffling, a window is only the unit of reading
_MAX_WINDOW_ROWS = 1 << 20  # sorting more rows at once would be a noticeable pause
_RUNS = 64  # blocks at a time without windows
_CHUNK = 4096  # rows to look up at once without windows


@dataclass(frozen=True, slots=True)
class Window:
    """Rows that are read together: runs of consecutive rows of one shard each, and the order of use.

    ``firsts`` and ``counts``: the runs. Counting through them, row ``mixed[i]`` is used as number ``i``; None: in
    order.
    """

    firsts: Rows
    counts: Rows
    mixed: Rows | None

    def rows(self) -> Rows:
        """The row numbers in the order of use."""
        return self.places(self.firsts, np.ones_like(self.counts))

    def places(self, bases: Rows, strides: Rows) -> Rows:
        """A number for each row, in the order of use: the base of its run, and a stride more for each row after."""
        starts = np.cumsum(self.counts) - self.counts
        found = np.arange(int(self.counts.sum()), dtype=np.int64)
        found *= np.repeat(strides, self.counts)
        found += np.repeat(bases - starts * strides, self.counts)
        return found if self.mixed is None else found[self.mixed]


@dataclass(frozen=True, kw_only=True)
class OrderSettings:
    """The settings that determine an order, besides the data. ``window_bytes``: how much is shuffled at a time."""

    shuffle: Shuffle = False
    seed: int = 0
    rank: int = 0
    world: int = 1
    drop_last: bool = False
    window_bytes: int = WINDOW_BYTES

    def __post_init__(self) -> None:
        if self.shuffle not in (True, False, "full"):
            raise SettingError(f"shuffle={self.shuffle!r} is not accepted. Accepted: True, False, 'full'.")
        if self.world < 1 or not 0 <= self.rank < self.world:
            raise SettingError(
                f"rank={self.rank!r}, world={self.world!r} is not accepted. Accepted: a world of at least 1, and a "
                "rank from 0 to world - 1."
            )


class Order:
    """The rows of every epoch for one rank. ``rows_per_epoch``: their number, equal for every rank.

    If the rows cannot be divided evenly, some are repeated; with ``drop_last`` some are left out instead.
    """

    def __init__(
        self, shards: Sequence[int], row_bytes: int, settings: OrderSettings, *, whole_shards: bool = False
    ) -> None:
        """``shards``: the rows of each. ``whole_shards``: a shard is one block: it can only be read as a whole."""
        self.settings = settings
        self.total_rows = sum(shards)
        share, rest = divmod(self.total_rows, settings.world)
        self.rows_per_epoch = share + (rest > 0 and not settings.drop_last)
        window = settings.window_bytes if settings.shuffle else min(settings.window_bytes, _PLAIN_WINDOW_BYTES)
        most = max(1, min(window // max(1, row_bytes), _MAX_WINDOW_ROWS))
        # Equal sizes: with a small last window, the disk would be idle while the one before it is used up.
        self.window_rows = max(1, -(-self.rows_per_epoch // max(1, -(-self.rows_per_epoch // most))))
        rows = np.asarray(shards, dtype=np.int64)
        block = max(1, max(shards) if whole_shards else BLOCK_BYTES // max(1, row_bytes))
        per_shard = -(-rows // block)
        starts = np.cumsum(rows) - rows
        numbers = np.arange(int(per_shard.sum()), dtype=np.int64) - np.repeat(
            np.cumsum(per_shard) - per_shard, per_shard
        )
        self._firsts = np.repeat(starts, per_shard) + numbers * block
        self._counts = np.minimum(np.repeat(rows, per_shard) - numbers * block, block)
        self._line: tuple[int, Rows, Rows, Rows] | None = None  # epoch, firsts, counts, ends
        self._rows: tuple[int, int, Rows] | None = None  # epoch, window, its rows

    @property
    def windows(self) -> int:
        """The number of windows in an epoch."""
        return -(-self.rows_per_epoch // self.window_rows)

    def rows(self, epoch: int, first: int, count: int) -> Rows:
        """The rows at places ``first`` to ``first + count`` of an epoch, which lie within it."""
        found: list[Rows] = []
        size = _CHUNK if self.settings.shuffle == "full" else self.window_rows
        while count > 0:
            window, skip = divmod(first, size)
            rows = self._rows_of(epoch, window)[skip : skip + count]
            found.append(rows)
            first, count = first + len(rows), count - len(rows)
        return found[0] if len(found) == 1 else np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def window(self, epoch: int, number: int) -> Window:
        """One window. ``shuffle="full"`` has none."""
        assert self.settings.shuffle != "full"
        settings = self.settings
        begin = number * self.window_rows
        count = min(self.window_rows, self.rows_per_epoch - begin)
        firsts, counts = self._cut(epoch, settings.rank * self.rows_per_epoch + begin, count)
        if not settings.shuffle:
            return Window(firsts, counts, None)
        key = mix(settings.seed, epoch, settings.rank, number, 1)
        return Window(firsts, counts, permutation(count, key))

    def windows_from(self, epoch: int, first: int) -> Iterator[Window]:
        """The windows of an epoch from that of place ``first`` on; for ``shuffle="full"``, the data in file order."""
        if self.settings.shuffle != "full":
            for number in range(first // self.window_rows, self.windows):
                yield self.window(epoch, number)
            return
        for begin in range(0, len(self._firsts), _RUNS):
            yield Window(self._firsts[begin : begin + _RUNS], self._counts[begin : begin + _RUNS], None)

    def most_runs(self) -> int:
        """An upper bound of the runs in any window: those of a window of the shortest blocks."""
        rows = min(self.window_rows, self.rows_per_epoch)
        whole = int(np.searchsorted(np.cumsum(np.sort(self._counts)), rows, side="right"))
        return whole + 4  # a part at each end, and two more where rows repeat and the line starts again

    def _rows_of(self, epoch: int, window: int) -> Rows:
        if self._rows is None or self._rows[:2] != (epoch, window):
            if self.settings.shuffle == "full":
                first = window * _CHUNK
                places = np.arange(first, min(first + _CHUNK, self.rows_per_epoch), dtype=np.int64)
                places += self.settings.rank * self.rows_per_epoch
                rows = scatter(self.total_rows, mix(self.settings.seed, epoch, 2), places % self.total_rows)
            else:
                rows = self.window(epoch, window).rows()
            self._rows = epoch, window, rows
        return self._rows[2]

    def _line_of(self, epoch: int) -> tuple[int, Rows, Rows, Rows]:
        """The blocks in the order of ``epoch``; without shuffling all epochs are the same."""
        epoch = epoch if self.settings.shuffle else 0
        if self._line is None or self._line[0] != epoch:
            firsts, counts = self._firsts, self._counts
            if self.settings.shuffle:
                order = permutation(len(firsts), mix(self.settings.seed, epoch, 0))
                firsts, counts = firsts[order], counts[order]
            self._line = epoch, firsts, counts, np.cumsum(counts)
        return self._line

    def _cut(self, epoch: int, begin: int, count: int) -> tuple[Rows, Rows]:
        """The runs of ``count`` rows of the line from ``begin`` on; after its end the line starts again."""
        _, firsts, counts, ends = self._line_of(epoch)
        begin %= self.total_rows
        part = min(count, self.total_rows - begin)
        low = int(np.searchsorted(ends, begin, side="right"))
        high = int(np.searchsorted(ends, begin + part, side="left")) + 1
        firsts, counts = firsts[low:high].copy(), counts[low:high].copy()
        skip = begin - (int(ends[low]) - int(counts[0]))
        firsts[0] += skip
        counts[0] -= skip
        counts[-1] -= int(ends[high - 1]) - (begin + part)
        if part == count:
            return firsts, counts
        more_firsts, more_counts = self._cut(epoch, 0, count - part)
        return np.concatenate([firsts, more_firsts]), np.concatenate([counts, more_counts])
