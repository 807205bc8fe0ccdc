"""Signals of a run. SIGINT, SIGTERM and SIGHUP end it with a checkpoint, a second SIGINT ends it at once, and SIGUSR1
requests a checkpoint without ending it.

Before the first step there is nothing to save, so the first three end the run at once, by an exception. From then on
the handler notes them, and the loop checks between two steps.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from ...core.endings import Closing

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal ended a run before its first step. A KeyboardInterrupt, because cleanup code expects that."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(
            f"Stopped by {number.name} before the first step: nothing is lost. Run the same command again."
        )
        self.status = 128 + int(number)


class Stopping(Closing):
    """Handles signals until ``close``. ``signal``: the first of SIGINT, SIGTERM and SIGHUP, or None."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.signal: signal.Signals | None = None
        self._say = say
        self._before: dict[signal.Signals, Any] = {}
        self.save_asked = False  # whether SIGUSR1 came since the last ``take_save``
        self._stepping = self._interrupted = False
        if threading.current_thread() is threading.main_thread():
            for number in (*_ENDING, signal.SIGUSR1):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and similar tools ignore it on purpose
                    self._before[number] = signal.signal(number, self._handle)

    def close(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @property
    def status(self) -> int:
        """The exit status that shells expect after a signal."""
        return 128 + int(self.signal) if self.signal is not None else 0

    def take_save(self) -> bool:
        """Whether SIGUSR1 requested a checkpoint; clears the request."""
        asked, self.save_asked = self.save_asked, False
        return asked

    def begin_steps(self) -> None:
        """From now on, note signals for the loop instead of raising."""
        if self.signal is not None:  # a destructor has swallowed the handler's exception
            raise Stopped(self.signal)
        self._stepping = True  # until this line, the handler raises

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save_asked = True
            self._tell("SIGUSR1: saving a checkpoint after the current step; training goes on.")
            return
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        first = self.signal is None
        self.signal = self.signal or signal.Signals(number)
        if not self._stepping:
            if first:
                raise Stopped(self.signal)
            return
        if number == signal.SIGINT:
            self._tell("Stopping after the current step, with a checkpoint. Ctrl-C again stops at once, without one.")
        elif first:
            self._tell(f"Stopping after the current step, with a checkpoint ({self.signal.name}).")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(RuntimeError):  # the signal interrupted a write to the same stream
            self._say(line)
