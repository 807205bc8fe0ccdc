"""Ctrl-C, SIGTERM and a terminal that goes: the step that runs ends and is saved. A second Ctrl-C ends at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class Stopping:
    """While entered, ``signal`` holds what has come: SIGINT, SIGTERM, SIGHUP, or None. Only on the main thread."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.signal: signal.Signals | None = None
        self._say = say
        self._before: dict[signal.Signals, Any] = {}

    @property
    def status(self) -> int:
        """The exit status that a shell expects of a program that a signal ended."""
        return 128 + int(self.signal) if self.signal is not None else 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and the like mean it
                    self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def _came(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        first = self.signal is None
        self.signal = self.signal or signal.Signals(number)
        if first:
            with contextlib.suppress(RuntimeError):  # Python was writing to that very stream
                self._say("Stopping: the step that runs is finished and saved. Ctrl-C again ends at once, without.")
