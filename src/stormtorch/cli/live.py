"""Shows a command on the screen: a line that redraws itself on a terminal, an occasional line anywhere else."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from ..core.sizes import format_bytes

if TYPE_CHECKING:
    from ..training.reporting import Status

_REDRAW_S, _LINE_S = 0.2, 10.0
_WIDTH = 24


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


class Live:
    """Prints messages, warnings and progress; messages appear above the line that is redrawn."""

    def __init__(
        self, *, out: TextIO | None = None, errors: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out or sys.stdout or io.StringIO()  # a process that was started without streams loses its messages
        self._errors = errors or sys.stderr or io.StringIO()
        self._dumb = os.environ.get("TERM") == "dumb"
        self._terminal = self._out.isatty() and not self._dumb
        self._clock, self._drawn_s = clock, float("-inf")
        self._drawn = self._final = False
        self._progress: Progress | None = None
        self._deaf = False

    def say(self, line: str) -> None:
        self._clear()
        self._print(line)

    def warn(self, line: str) -> None:
        self._clear()
        with contextlib.suppress(OSError, ValueError):
            print(f"storm train: {line}", file=self._errors, flush=True)

    def reading(self, total_bytes: int) -> Callable[[int], None]:
        """A bar that appears with the first piece: cached text is not read."""

        def read(count: int) -> None:
            if self._dumb:
                return
            if self._progress is None:
                self._progress = Progress(total_bytes, stream=self._errors)
            with contextlib.suppress(OSError, ValueError):
                self._progress(count)

        return read

    def show(self, status: Status) -> None:
        now = self._clock()
        if self._terminal and (now - self._drawn_s >= _REDRAW_S or status.step == status.total):
            width = shutil.get_terminal_size().columns
            self._print(f"\r{status_line(status, width - 1)}\x1b[K", end="")
            self._drawn_s, self._drawn, self._final = now, True, status.step == status.total

    def log(self, status: Status) -> None:
        if not self._terminal:
            self._print(status_line(status))

    def close(self) -> None:
        """Keep the last state of the line, and start a new line."""
        self._final = True
        self._clear()

    def _print(self, text: str, *, end: str = "\n") -> None:
        """Print, unless the reader has closed the stream, which does not end a run of many hours."""
        if self._deaf:
            return
        try:
            print(text, end=end, file=self._out, flush=True)
        except (OSError, ValueError):  # closed by the reader, or by ourselves
            self._deaf = True
            if self._out is sys.stdout:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python complains again when it flushes at exit
            self.warn("The reader closed the output. Training goes on; metrics.jsonl has its numbers.")

    def _end_progress(self) -> None:
        if self._progress is not None and self._errors.isatty():
            with contextlib.suppress(OSError, ValueError):
                self._progress.close()
        self._progress = None

    def _clear(self) -> None:
        self._end_progress()
        if self._drawn:
            self._drawn = False
            self._print("" if self._final else "\r\x1b[K", end="\n" if self._final else "")


def status_line(status: Status, width: int | None = None) -> str:
    """Progress, time left, loss, speed, and memory with its budgets: as many as fit in ``width``."""
    loss = f"{status.loss:.4f}" if status.loss is not None else "-"
    speed = f"{status.tokens_per_s:,.0f}" if status.tokens_per_s is not None else "-"
    line, *more = (
        f"step {status.step}/{status.total}",
        f"ETA {clock_text(status.left_s) if status.left_s is not None else '-'}",
        f"loss {loss}",
        f"{speed} tokens/s",
        f"{'VRAM' if status.on_gpu else 'device'} {_share(status.vram_bytes, status.vram_limit_bytes)}",
        f"RAM {_share(status.ram_bytes, status.ram_limit_bytes)}",
    )
    for part in more:
        if width is not None and len(line) + 2 + len(part) > width:
            break
        line += f"  {part}"
    return line[:width]


def _share(used: int, limit: int) -> str:
    """Both in the unit of the limit, which saves columns, unless the used part would round to zero."""
    text = format_bytes(limit)
    scaled = used / limit * float(text.split()[0]) if limit else 0.0
    return f"{scaled:.1f}/{text}" if scaled >= 0.1 else f"{format_bytes(used)}/{text}"


def clock_text(seconds: float) -> str:
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
