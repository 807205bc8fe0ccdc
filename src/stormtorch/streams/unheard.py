"""Operations of our own in the middle of a block: whoever notes what a block does passes over them.

Weights come while a block runs, and room is made for them; and not in every run of it. Torch's own way to hide from
dispatch modes would hide too much: users' modes, and those that count memory in tests, are to see them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class _Here(threading.local):
    depth = 0


_here = _Here()


def is_our_own() -> bool:
    """Whether what runs now on the calling thread is no operation of a block."""
    return _here.depth > 0


def unheard(function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        _here.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _here.depth -= 1

    return inside
