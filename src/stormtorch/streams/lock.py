"""One lock for a session's streams.

Backward runs on a thread of autograd's, but gradients that torch delivers itself, those of parameters with hooks,
arrive on the thread that called it, at the same time. What both touch is entered one at a time.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Any)


def locked(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that holds ``self.lock`` while it runs, re-entrant, and that Ctrl-C does not cut in two."""

    @functools.wraps(method)
    def inside(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock, _shield:
            return method(self, *args, **kwargs)

    return cast(Callable[Concatenate[S, P], R], inside)


class _Shield:
    """On the main thread, a Ctrl-C is kept until the outermost method ends; a second one gets through at once.

    Written so that one which arrives inside of these few lines themselves leaves nothing wrong behind.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._came: tuple[int, Any] | None = None
        self._handler: Any = None
        self._ours = self._keep

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth == 0:
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler) and handler != self._ours:
                self._came, self._handler = None, handler
                signal.signal(signal.SIGINT, self._ours)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth == 0 and self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            came, self._came = self._came, None
            if came is not None:
                self._handler(*came)

    def _keep(self, number: int, frame: Any) -> None:
        if self._came is not None:  # twice: whatever is being waited for may never come
            self._came = None
            self._handler(number, frame)
        self._came = (number, frame)


_shield = _Shield()
