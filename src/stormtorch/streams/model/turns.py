"""Lets one thread at a time use a streamed model.

Device views are set in modules that all threads share, and the gradients of a backward are gathered unit by unit: a
forward or a backward beside them on another thread would mix the two. So both are refused.

Backward runs on threads of autograd's, and may end by an exception without a call of ours. What tells that one is still
running is the callback that autograd holds for its end: it is gone as soon as the backward is."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from threading import get_ident

from ...core.errors import StormError
from ..bridge.torch_private import at_end_of_backward, current_pass, runs_backward

_GRACE_S = 1.0  # a backward that has failed lives on for a moment, on autograd's thread
_ADVICE = "Let threads take turns (a threading.Lock around calls and backward), or give each a model of its own."


class Turns:
    """Which thread is inside a forward, and whether a backward runs."""

    def __init__(self) -> None:
        self._caller: int | None = None  # the thread whose forward runs
        self._running: weakref.ref[Callable[[], None]] | None = None
        self.backward = -1  # the number of the running backward

    def wait_for_backward(self) -> None:
        """Raise if a backward runs on another thread. Not to be called in a backward."""
        until_s = 0.0
        while self._running is not None and self._running() is not None:
            until_s = until_s or time.monotonic() + _GRACE_S
            if time.monotonic() > until_s:
                raise StormError(f"Another thread runs a backward of this model. {_ADVICE}")
            time.sleep(1e-3)

    def begin_forward(self) -> None:
        here = get_ident()
        if self._caller not in (None, here) and any(thread.ident == self._caller for thread in threading.enumerate()):
            raise StormError(f"Another thread is inside of this model, which runs one call at a time. {_ADVICE}")
        self._caller = here

    def end_forward(self) -> None:
        self._caller = None

    def begin_backward(self) -> None:
        """A backward other than ``backward`` asks for a saved tensor."""
        number, caller = current_pass(), self._caller
        if number == -1:
            return
        if caller not in (None, get_ident()) and not runs_backward(caller):
            raise StormError(f"Cannot run backward: another thread is inside of this model. {_ADVICE}")
        end = functools.partial(self._end_backward, number)
        self.backward, self._running = number, weakref.ref(end)
        at_end_of_backward(end)

    def _end_backward(self, number: int) -> None:
        if self.backward == number:
            self.backward, self._running = -1, None
