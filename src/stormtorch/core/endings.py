"""What has to be undone, in the order in which it will be."""

from __future__ import annotations

from collections.abc import Callable


class Endings:
    """Calls that end what was opened. Each part adds its own as soon as it is there."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []
        self._last: list[Callable[[], object]] = []

    def before_others(self, call: Callable[[], object]) -> None:
        """The usual place: what was opened last ends first."""
        self._calls.insert(0, call)

    def after_others(self, call: Callable[[], object]) -> None:
        """For what is opened late, and used by others that end."""
        self._calls.append(call)

    def last(self, call: Callable[[], object]) -> None:
        """For what all others must have ended before, also those that are opened later."""
        self._last.insert(0, call)

    def run(self) -> None:
        """Each is tried, once; the first error is raised."""
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
