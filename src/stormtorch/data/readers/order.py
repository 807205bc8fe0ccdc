"""Which rows come when. A pure function of seed, epoch and the data's layout; nothing here reads data or keeps state.

How a shuffled epoch is made:

1. Every shard is cut into *blocks*, runs of consecutive rows of about 2 MiB.
2. The blocks of all shards are permuted. Their rows, one block after the other, are the epoch's *line*.
3. Each rank takes an equal, consecutive part of the line.
4. The part is cut into *windows* of equal size, at most 256 MiB, and the rows of each window are permuted.

A disk reads whole blocks, one window ahead, at the rate of large reads; and data no larger than a window is shuffled
with nothing to be desired. It never matters how the bytes are read: the order depends on the number of rows, the
sizes of shards and rows, and the settings, so that a run can go on on another machine.

How close that is to uniform. The place of any one row in the epoch *is* uniform, because its block's place is: the mean
of ``|place - row| / rows`` is 1/3, as for a full shuffle. What is not independent is neighbours: two rows that are
neighbours in the file lie in the same window, mostly, and so meet in one batch with probability
``(batch - 1) / (window - 1)`` instead of ``(batch - 1) / (rows - 1)``. With windows of 21,000 rows (of 12 KiB each)
and batches of 128 that is 0.6 %. ``tests/data/test_order.py`` measures both. Where that matters, ``shuffle="full"``
gives every row a place of its own, at the price of random reads, which only data in RAM bears.

Memory: 16 bytes per block, 8 MiB per TiB of data, and the rows of one window at a time. The road not taken is a
permutation of all rows as an array: 8 bytes per row are gigabytes for data of billions of rows, in every worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...core.errors import SettingError
from ...core.sizes import MiB
from .permutations import Rows, Scatter, mix, permutation

Shuffle = bool | Literal["full"]
BLOCK_BYTES = 2 * MiB
WINDOW_BYTES = 256 * MiB
_PLAIN_WINDOW_BYTES = 32 * MiB  # without shuffling a window is only what is read at once
_MOST_WINDOW_ROWS = 1 << 20  # rows of a few bytes: sorting more of them at once would be a noticeable pause
_RUNS = 64  # blocks at a time where there are no windows
_CHUNK = 4096  # rows looked up at once where there are no windows


@dataclass(frozen=True, slots=True)
class Window:
    """Rows that are read together: runs of consecutive rows of one shard each, and the order in which they are used.

    ``firsts`` and ``counts`` are the runs. Counting through them, row ``mixed[i]`` is used as number ``i``; None: in
    order.
    """

    firsts: Rows
    counts: Rows
    mixed: Rows | None

    def natural(self) -> Rows:
        """The rows' numbers, run by run."""
        starts = np.cumsum(self.counts) - self.counts
        rows = np.arange(int(self.counts.sum()), dtype=np.int64)
        rows += np.repeat(self.firsts - starts, self.counts)
        return rows

    def rows(self) -> Rows:
        """The rows' numbers in the order of their use."""
        natural = self.natural()
        return natural if self.mixed is None else natural[self.mixed]


@dataclass(frozen=True, kw_only=True)
class OrderSettings:
    """What an order depends on besides the data. ``window_bytes`` is how much is shuffled at a time."""

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
                f"rank={self.rank!r}, world={self.world!r} do not fit. Accepted: a world of at least 1, and a rank "
                f"from 0 to world - 1."
            )


class Order:
    """The rows of every epoch for one rank. ``rows_per_epoch`` is how many that are, the same for every rank.

    Where the rows cannot be divided evenly, some are repeated so that each rank has as many; with ``drop_last`` some
    are left out instead.
    """

    def __init__(
        self, shards: Sequence[int], row_bytes: int, settings: OrderSettings, *, whole_shards: bool = False
    ) -> None:
        """``shards``: rows of each. ``whole_shards``: a shard is one block, because it can only be read as a whole."""
        self.settings = settings
        self.total_rows = sum(shards)
        share, rest = divmod(self.total_rows, settings.world)
        self.rows_per_epoch = share + (rest > 0 and not settings.drop_last)
        window = settings.window_bytes if settings.shuffle else min(settings.window_bytes, _PLAIN_WINDOW_BYTES)
        most = max(1, min(window // max(1, row_bytes), _MOST_WINDOW_ROWS))
        # Equal ones: while a large one is used up, the disk would have nothing to do but to read a small last one.
        self.window_rows = max(1, -(-self.rows_per_epoch // max(1, -(-self.rows_per_epoch // most))))
        rows = np.asarray(shards, dtype=np.int64)
        block = max(1, BLOCK_BYTES // max(1, row_bytes))
        per_shard = np.ones_like(rows) if whole_shards else -(-rows // block)
        starts = np.cumsum(rows) - rows
        numbers = np.arange(int(per_shard.sum()), dtype=np.int64) - np.repeat(
            np.cumsum(per_shard) - per_shard, per_shard
        )
        self._firsts = np.repeat(starts, per_shard) + numbers * block
        self._counts = (
            np.repeat(rows, per_shard)
            if whole_shards
            else np.minimum(np.repeat(rows, per_shard) - numbers * block, block)
        )
        there = self._counts > 0  # a group without rows is in no run
        self._firsts, self._counts = self._firsts[there], self._counts[there]
        self._line: tuple[int, Rows, Rows, Rows] | None = None  # epoch, firsts, counts, ends
        self._rows: tuple[int, int, Rows] | None = None  # epoch, window, its rows
        self._scatter: tuple[int, Scatter] | None = None

    @property
    def windows(self) -> int:
        """How many windows an epoch has."""
        return -(-self.rows_per_epoch // self.window_rows)

    def rows(self, epoch: int, first: int, count: int) -> Rows:
        """The rows at places ``first`` to ``first + count`` of an epoch, which must not lie behind its end."""
        found: list[Rows] = []
        size = _CHUNK if self.settings.shuffle == "full" else self.window_rows
        while count > 0:
            window, skip = divmod(first, size)
            rows = self._rows_of(epoch, window)[skip : skip + count]
            found.append(rows)
            first, count = first + len(rows), count - len(rows)
        return found[0] if len(found) == 1 else np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def window(self, epoch: int, number: int) -> Window:
        """One window. Not for ``shuffle="full"``, which has none."""
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
        """The windows of an epoch from that of place ``first`` on; for ``shuffle="full"`` the data in its own order."""
        if self.settings.shuffle != "full":
            for number in range(first // self.window_rows, self.windows):
                yield self.window(epoch, number)
            return
        for begin in range(0, len(self._firsts), _RUNS):
            yield Window(self._firsts[begin : begin + _RUNS], self._counts[begin : begin + _RUNS], None)

    def most_runs(self) -> int:
        """An upper bound of the runs in any window: as many as there are if the shortest blocks come together."""
        rows = min(self.window_rows, self.rows_per_epoch)
        whole = int(np.searchsorted(np.cumsum(np.sort(self._counts)), rows, side="right"))
        return whole + 4  # a part at each end, and two more where rows repeat and the line begins anew

    def _rows_of(self, epoch: int, window: int) -> Rows:
        if self._rows is None or self._rows[:2] != (epoch, window):
            if self.settings.shuffle == "full":
                first = window * _CHUNK
                places = np.arange(first, min(first + _CHUNK, self.rows_per_epoch), dtype=np.int64)
                places += self.settings.rank * self.rows_per_epoch
                rows = self._scatter_of(epoch).at(places % self.total_rows)
            else:
                rows = self.window(epoch, window).rows()
            self._rows = epoch, window, rows
        return self._rows[2]

    def _scatter_of(self, epoch: int) -> Scatter:
        if self._scatter is None or self._scatter[0] != epoch:
            self._scatter = epoch, Scatter(self.total_rows, mix(self.settings.seed, epoch, 2))
        return self._scatter[1]

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
        """The runs of ``count`` rows of the line from ``begin`` on; behind its end it begins anew."""
        _, firsts, counts, ends = self._line_of(epoch)
        runs: list[tuple[Rows, Rows]] = []
        while count > 0:
            begin %= self.total_rows
            part = min(count, self.total_rows - begin)
            low = int(np.searchsorted(ends, begin, side="right"))
            high = int(np.searchsorted(ends, begin + part, side="left")) + 1
            run_firsts, run_counts = firsts[low:high].copy(), counts[low:high].copy()
            skip = begin - (int(ends[low]) - int(run_counts[0]))
            run_firsts[0] += skip
            run_counts[0] -= skip
            run_counts[-1] -= int(ends[high - 1]) - (begin + part)
            runs.append((run_firsts, run_counts))
            begin, count = begin + part, count - part
        return np.concatenate([first for first, _ in runs]), np.concatenate([count for _, count in runs])
