"""Progress of a long command: a bar that redraws itself on a terminal, an occasional line anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from ..core.sizes import format_bytes

_WIDTH = 24
_REDRAW_S, _LINE_S = 0.1, 10.0


class Progress:
    """Call it with the bytes of each piece; ``close`` ends the line. Writes to stderr by default."""

    def __init__(
        self, total_bytes: int, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total_bytes, self.done_bytes = max(total_bytes, 1), 0
        self._stream = sys.stderr if stream is None else stream
        self._bar = self._stream.isatty()
        self._clock, self._start = clock, clock()
        self._shown = self._start

    def __call__(self, count: int) -> None:
        self.done_bytes += count
        now = self._clock()
        if now - self._shown >= (_REDRAW_S if self._bar else _LINE_S):
            self._shown = now
            self._show("" if self._bar else "\n")

    def close(self) -> None:
        """Show the final state, on a line of its own."""
        self._show("\n")

    def text(self) -> str:
        """Share, bytes, rate, and the time left at that rate."""
        share = min(self.done_bytes / self.total_bytes, 1.0)
        rate = self.done_bytes / max(self._clock() - self._start, 1e-9)
        left = (self.total_bytes - self.done_bytes) / rate if rate else 0.0
        filled = int(share * _WIDTH)
        bar = f"[{'#' * filled}{'.' * (_WIDTH - filled)}] " if self._bar else ""
        amount = f"{format_bytes(min(self.done_bytes, self.total_bytes))} of {format_bytes(self.total_bytes)}"
        return f"{bar}{share:4.0%}  {amount}  {format_bytes(int(rate))}/s  ETA {clock_text(left)}"

    def _show(self, after: str) -> None:
        text = f"\r{self.text()}\x1b[K" if self._bar else self.text()  # clears the end of a longer text before
        print(text, end=after, file=self._stream, flush=True)


def clock_text(seconds: float) -> str:
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
