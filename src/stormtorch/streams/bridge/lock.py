"""One lock for a session's streams.

Backward runs on a thread of autograd's. Gradients that torch delivers itself, those of parameters with hooks, arrive at
the same time on the thread that called backward. The lock lets one of them in at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from .handlers import deliver, inside_step, look, state

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Any)


def locked(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let a method hold ``self.lock`` while it runs (re-entrant), without interruption by signal handlers.

    Like `handlers.undisturbed`, written out: it is called some hundred times a step."""

    @functools.wraps(method)
    def inside(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        if get_ident() != state.main:
            with self.lock:
                return method(self, *args, **kwargs)
        before = state.depth
        if state.cut:
            raise inside_step("use the session")
        if not before and state.sessions:
            look()
        try:
            state.depth = before + 1
            with self.lock:
                return method(self, *args, **kwargs)
        finally:
            state.depth = before
            if state.waiting and not before:
                deliver()

    return cast(Callable[Concatenate[S, P], R], inside)
