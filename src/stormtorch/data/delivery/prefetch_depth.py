"""How many batches to prefetch.

Depth absorbs jitter: a disk that pauses, a step that is shorter than usual. It does not make reading faster, and
cycling through more memory than needed evicts it from the CPU's caches. So depth starts at a few megabytes, enough to
request several batches at a time, because waking a thread costs as much as reading a small batch. It doubles when the
user waits *although* the queue was full at some time since it last grew: then reading is the faster side, and a longer
queue would have bridged the gap. If the queue is never full, reading is the slower side, and depth changes nothing.

Depth is bounded in bytes. Every growth is charged first; a refusal ends the growth, not the run.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.sizes import MiB

_FIRST, _MOST = (4, 16), 64
_FIRST_BYTES = 16 * MiB
_MOST_BYTES = 256 * MiB
WAIT_S = 50e-6  # shorter waits are thread switches


class Depth:
    """``batches``: the present depth; 0 if there is not even memory for one."""

    def __init__(self, batch_bytes: int, grow: Callable[[int], bool], *, group: int = 1) -> None:
        """``grow`` makes room for that many batches, or refuses. Starts with the largest first depth that it allows.

        ``group``: how many of the user's batches count as one here."""
        self._grow = grow
        self._most = max(1, min(max(_FIRST[0], _MOST // group), _MOST_BYTES // max(1, batch_bytes)))
        self.was_full = False  # when the user requested a batch, at some time since the last growth
        wanted = min(max(_FIRST[0], min(_FIRST[1], _FIRST_BYTES // max(1, batch_bytes))), self._most)
        self.batches = next((depth for depth in range(wanted, 0, -1) if grow(depth)), 0)

    def grow_while(self, may: Callable[[int], bool]) -> None:
        """Grow as far as ``may`` allows a number of batches. For a GPU, before the loop.

        Page-locking stops the process for milliseconds, and the CPU's caches do not matter for a GPU's copies."""
        while self.batches < self._most and may(min(2 * self.batches, self._most)):
            self._double()

    def waited(self, seconds: float) -> None:
        """Note how long the user waited for a batch; grow if that helps."""
        if seconds < WAIT_S or not self.was_full or self.batches >= self._most:
            return
        self.was_full = False
        self._double()

    def _double(self) -> None:
        wanted = min(2 * self.batches, self._most)
        if self._grow(wanted):
            self.batches = wanted
        else:
            self._most = self.batches
