"""Where a run is cut into slices, between which something else is measured.

While the loader is not asked for batches it reads on until its windows are full. So the first windows of a slice are
used before the clock starts. The clock starts and stops when the first batch of a whole window comes: at any other
place it would count windows that were read and not yet used, or the reverse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SKIPPED, MEASURED = 3, 8  # windows
_LEAST = 4  # of a slice at the end of a run


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The windows of a run of ``epochs`` epochs of ``rows`` rows, in batches of ``batch``. They are counted on."""

    rows: int
    window_rows: int
    batch: int
    epochs: int

    @property
    def per_epoch(self) -> int:
        return -(-self.rows // self.window_rows)

    def batch_of(self, window: int) -> int:
        """The number in the run of the first batch that has a row of it."""
        epoch, number = divmod(window, self.per_epoch)
        return epoch * -(-self.rows // self.batch) + number * self.window_rows // self.batch

    def is_whole(self, window: int) -> bool:
        return self.per_epoch == 1 or (window % self.per_epoch + 1) * self.window_rows <= self.rows

    def slices(self) -> Iterator[tuple[int, int]]:
        """First and last batch of each slice: of those, all but one are in the time between the two."""
        whole = [window for window in range(self.per_epoch * self.epochs) if self.is_whole(window)]
        begin = 0
        while whole:
            whole = [window for window in whole if window >= begin + SKIPPED]
            first = whole[0] if whole else 0
            last = next((window for window in whole if window >= first + MEASURED), whole[-1] if whole else 0)
            if last - first < _LEAST:
                return
            yield self.batch_of(first), self.batch_of(last)
            begin = last
