"""One lock for a session's streams.

Backward runs on a thread of autograd's. Gradients that torch delivers itself, those of parameters with hooks, arrive at
the same time on the thread that called backward. The lock lets one of them in at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import ParamSpec, TypeVar

from .handlers import section

P = ParamSpec("P")
R = TypeVar("R")

_lock_of = attrgetter("lock")


def locked(method: Callable[P, R]) -> Callable[P, R]:
    """Let a method hold ``self.lock`` while it runs (re-entrant), without interruption by signal handlers."""
    return section(method, _lock_of)
