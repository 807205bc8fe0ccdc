"""How many batches are read ahead.

Depth is there for jitter: a disk that pauses, a step that is short for once. It cannot make reading faster, and memory
that is cycled through without need falls out of the CPU's caches. So it starts with a few megabytes, enough to hand
over several batches at a time, because waking a thread costs as much as reading a small batch. It doubles when the
user had to wait *although* all of it had been full since the last time it grew: reading was the faster side then, and
a longer queue would have bridged the gap. If it is never full, reading is the slower side, and depth changes nothing.

It is bounded in bytes, and every growth is charged first; a refusal is the end of growing, not of the run.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.sizes import MiB

_FIRST, _MOST = (4, 16), 64
_FIRST_BYTES = 16 * MiB
_MOST_BYTES = 256 * MiB
WAIT_S = 50e-6  # shorter waits are hand-overs between threads


class Depth:
    """``batches`` is the depth now."""

    def __init__(self, batch_bytes: int, grow: Callable[[int], bool], *, group: int = 1) -> None:
        """``grow`` makes room for so many batches, or refuses. Grows to the first depth, or to one less, down to 1.

        ``group``: how many of the user's batches one of these is."""
        self._grow = grow
        self._most = max(1, min(max(_FIRST[0], _MOST // group), _MOST_BYTES // max(1, batch_bytes)))
        self.batches = 0
        self._was_full = False
        wanted = min(max(_FIRST[0], min(_FIRST[1], _FIRST_BYTES // max(1, batch_bytes))), self._most)
        while wanted > 1 and not grow(wanted):
            wanted -= 1
        if wanted == 1 and not grow(1):
            return
        self.batches = wanted

    def grow_while(self, may: Callable[[int], bool]) -> None:
        """Grow as far as it goes, as long as ``may`` the number of batches: where memory is better taken before a loop.

        Page-locking stops everything for milliseconds, and what is copied by a GPU does not care for the CPU's caches.
        """
        while self.batches < self._most and may(wanted := min(2 * self.batches, self._most)):
            if not self._grow(wanted):
                self._most = self.batches
                return
            self.batches = wanted

    def saw_full(self) -> None:
        """Tell that all of it was read when the user asked for a batch."""
        self._was_full = True

    def waited(self, seconds: float) -> None:
        """Tell how long the user had to wait for one."""
        if seconds < WAIT_S or not self._was_full or self.batches >= self._most:
            return
        self._was_full = False
        wanted = min(2 * self.batches, self._most)
        if self._grow(wanted):
            self.batches = wanted
        else:
            self._most = self.batches
