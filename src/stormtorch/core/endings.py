"""Ends of what was opened: `with` blocks, and calls in the order in which they will run."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self


class Closing:
    """Calls ``close`` at the end of a ``with`` block."""

    def close(self) -> object:
        """End it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Endings:
    """Calls that end what was opened. Each part adds its own as soon as it exists."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []
        self._last: list[Callable[[], object]] = []

    def before_others(self, call: Callable[[], object]) -> None:
        """The usual place: the part that was opened last ends first."""
        self._calls.insert(0, call)

    def after_others(self, call: Callable[[], object]) -> None:
        """For a part that is opened late but used by parts that end before it."""
        self._calls.append(call)

    def last(self, call: Callable[[], object]) -> None:
        """For a part that ends after all others, also after those that are opened later."""
        self._last.insert(0, call)

    def run(self) -> None:
        """Run each call once, even after an error; the first error is raised."""
        calls = [*self._calls, *self._last]
        self._calls, self._last = [], []
        error: BaseException | None = None
        for call in calls:
            try:
                call()
            except BaseException as problem:
                error = error or problem
        if error is not None:
            raise error
