"""Signals of a run. SIGINT, SIGTERM and SIGHUP end it with a checkpoint, a second SIGINT ends it at once, and SIGUSR1
asks for a checkpoint and lets it go on.

Before the first step there is nothing to save, so the first three end the run where it stands, by an exception. From
then on they are noted, and the loop looks at them between two steps.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal has ended a run before its first step. A KeyboardInterrupt, because code that cleans up knows that."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"Stopped by {number.name} before a step was made: nothing is lost. The same command goes on.")
        self.status = 128 + int(number)


class Stopping:
    """While entered, ``signal`` holds the first that came of SIGINT, SIGTERM and SIGHUP, or None. Main thread only."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.signal: signal.Signals | None = None
        self._say = say
        self._before: dict[signal.Signals, Any] = {}
        self._stepping = self._interrupted = self._save_asked = False

    @property
    def status(self) -> int:
        """The exit status that a shell expects of a program that a signal ended."""
        return 128 + int(self.signal) if self.signal is not None else 0

    @property
    def save_asked(self) -> bool:
        """Whether SIGUSR1 has come since the last ``take_save``."""
        return self._save_asked

    def take_save(self) -> bool:
        """Whether SIGUSR1 asks for a checkpoint; the next one asks for another."""
        asked, self._save_asked = self._save_asked, False
        return asked

    def check(self) -> None:
        """Raise `Stopped` if a signal has come: a destructor that ran just then may have swallowed the first one."""
        if self.signal is not None:
            raise Stopped(self.signal)

    def begin_steps(self) -> None:
        """From here on the loop sees to signals between two steps."""
        self.check()
        self._stepping = True  # a signal between these two lines raises: the handler does so until this one has run

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (*_ENDING, signal.SIGUSR1):
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
        if number == signal.SIGUSR1:
            self._save_asked = True
            self._tell("SIGUSR1: a checkpoint is saved after the step that runs, and training goes on.")
            return
        again = number == signal.SIGINT and self._interrupted
        self._interrupted |= number == signal.SIGINT
        if again:
            raise KeyboardInterrupt
        first = self.signal is None
        self.signal = self.signal or signal.Signals(number)
        if not self._stepping:
            if first:
                raise Stopped(self.signal)
            return
        if number == signal.SIGINT:
            self._tell("Stopping: the step that runs is finished and saved. Ctrl-C again ends at once, without.")
        elif first:
            self._tell(f"Stopping ({self.signal.name}): the step that runs is finished and saved.")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(RuntimeError):  # Python was writing to that very stream
            self._say(line)
