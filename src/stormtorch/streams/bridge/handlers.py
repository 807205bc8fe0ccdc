"""Keeps Python's signal handlers out of our critical sections, so that they may use a streamed model like other code.

Python runs a handler on the main thread, between any two of its instructions: inside our code too, where a lock is held
or a table is half changed. So, while a session is open, every Python handler is called through a `Deferred`. A signal
that arrives inside a *section* (`locked` methods and `undisturbed` functions) is kept, and its handler runs when the
outermost section ends. Outside of sections it runs at once, as usual. So a handler that raises never interrupts a
section, and one that reads a weight finds a consistent state.

Two signals do interrupt a section, because it may wait for something that never comes: a second Ctrl-C, and a signal
that has waited for ``PATIENCE_S``. Such a handler may raise or set a flag; the session refuses its calls.

Handlers that user code installs later are found when a section begins. Sections cost no system call."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # wrapped by signal.py
import _thread
import contextlib
import functools
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from threading import get_ident
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch

from ...core.errors import InsideStep
from .torch_private import innermost_hooks, with_torch_function

P = ParamSpec("P")
R = TypeVar("R")
Handler = Callable[[int, FrameType | None], Any]

PATIENCE_S = 10.0
_ALL = tuple(sorted(int(number) for number in signal.valid_signals()))
_handler_of = _signal.getsignal  # signal.getsignal makes enums, and takes four times as long
_NO_LOCK = contextlib.nullcontext()


class State:
    """State of the main thread. Only the main thread writes it."""

    __slots__ = ("cut", "depth", "is_watched", "main", "numbers", "overdue", "running", "seen", "sessions", "waiting")

    def __init__(self) -> None:
        self.main = threading.main_thread().ident
        self.depth = 0  # nesting of sections
        self.cut = False  # a handler runs inside a section
        self.waiting: dict[int, tuple[Handler, float]] = {}  # by number: signals that came inside a section, and when
        self.is_watched = False  # a thread checks whether they wait for too long
        self.overdue: set[int] = set()  # those that have
        self.running = 0  # the number of the handler that runs; 0 outside of handlers
        self.numbers = itertools.count(1)
        self.sessions = 0
        self.seen: tuple[Any, ...] = ()  # handlers of the usual signals, when last checked


state = State()


def handler_here() -> int:
    """The number of the signal handler that the calling thread runs; 0 outside of handlers."""
    return state.running if state.running and get_ident() == state.main else 0


class Deferred:
    """Stands in for a user's handler. May remain installed without a session: it then calls it at once."""

    __slots__ = ("handler",)

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not state.depth:
            _run(self.handler, number, frame)
        elif number not in state.waiting:
            state.waiting[number] = self.handler, time.monotonic()
            _watch()
        elif number == signal.SIGINT or number in state.overdue:
            state.overdue.discard(number)
            del state.waiting[number]
            before, state.cut = state.cut, True
            try:
                self.handler(number, frame)
            finally:
                state.cut = before


def deliver() -> None:
    """Run the handlers of signals that came inside the section that has just ended."""
    while state.waiting and not state.depth:
        number = next(iter(state.waiting))
        came = state.waiting.pop(number, None)
        state.overdue.discard(number)
        if came is not None:
            _run(came[0], number, sys._getframe(1))


def _run(handler: Handler, number: int, frame: FrameType | None) -> None:
    before, state.running = state.running, next(state.numbers)
    try:
        with _as_user_code():
            handler(number, frame)
    finally:
        state.running = before


@contextlib.contextmanager
def _as_user_code() -> Iterator[None]:
    """Undo what our code or a pass has set for this thread: `__torch_function__` works, saved tensors are kept."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(with_torch_function())
        if innermost_hooks() is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept))
        yield


def _watch() -> None:
    """Send signals again if they wait for too long: a section may wait for something that never comes."""
    if not state.is_watched:
        state.is_watched = True
        try:
            # The raw call: threading takes a lock to start a thread, which the interrupted code may hold.
            _thread.start_new_thread(_send_overdue, ())
        except RuntimeError:  # no thread available
            state.is_watched = False


def _send_overdue() -> None:
    while state.is_watched:
        time.sleep(PATIENCE_S / 10)
        for number, (_, came_s) in list(state.waiting.items()):
            if time.monotonic() - came_s > PATIENCE_S and state.main is not None:
                state.overdue.add(number)
                signal.pthread_kill(state.main, number)
        if not state.waiting:
            state.is_watched = False
            if state.waiting:  # a signal came in between, and relies on this thread
                state.is_watched = True


# --- which handlers there are


_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGCHLD")
_USUAL = tuple(int(getattr(signal, name)) for name in _NAMES)


def look() -> None:
    """Wrap handlers of the usual signals that user code has installed since: a section begins."""
    if tuple(map(_handler_of, _USUAL)) != state.seen:
        _defer(_USUAL)
        state.seen = tuple(map(_handler_of, _USUAL))


def look_at_all() -> None:
    """Like ``look`` for every signal, which takes longer: a pass or a step begins."""
    if state.sessions and get_ident() == state.main:
        _defer(_ALL)


def _defer(numbers: tuple[int, ...]) -> None:
    for number in numbers:
        handler = _handler_of(number)
        if callable(handler) and type(handler) is not Deferred:
            signal.signal(number, Deferred(handler))


def begin(owner: object) -> Callable[[], object]:
    """Let handlers wait for sections from now on; returns a function that ends that, as the end of ``owner`` does."""
    state.sessions += 1
    ending = weakref.finalize(owner, _end)
    ending.atexit = False
    look_at_all()
    return ending


def _end() -> None:
    state.sessions -= 1
    if not state.sessions and get_ident() == state.main:
        for number in _ALL:
            handler = _handler_of(number)
            if type(handler) is Deferred:
                signal.signal(number, handler.handler)
        deliver()


def undisturbed(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` as a section, which takes no lock."""
    return section(function, lambda _: _NO_LOCK)


def section(function: Callable[P, R], lock_of: Callable[[Any], AbstractContextManager[Any]]) -> Callable[P, R]:
    """``function`` as a section that holds a lock, which ``lock_of`` finds in its first argument."""

    @functools.wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        lock = lock_of(args[0])
        if get_ident() != state.main:
            with lock:
                return function(*args, **kwargs)
        before = state.depth
        if state.cut:
            raise inside_step("use the session")
        if not before and state.sessions:
            look()
        try:
            state.depth = before + 1
            with lock:
                return function(*args, **kwargs)
        finally:
            state.depth = before
            if state.waiting and not before:
                deliver()

    return inside


def inside_step(what: str) -> InsideStep:
    """The error for a handler that asks for something impossible at the point it has interrupted."""
    return InsideStep(
        f"Cannot {what} from a signal handler that has interrupted a forward, a backward, a step or a save. Set a flag "
        "in the handler, and act on it in the training loop, after optimizer.step()."
    )


def _begin_in_child() -> None:
    state.main, state.depth, state.cut = get_ident(), 0, False
    state.is_watched = False
    state.waiting.clear()
    state.overdue.clear()


os.register_at_fork(after_in_child=_begin_in_child)
