"""How fast a run is, and how long it has to go: from the last steps, without the pauses between them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator


class Pace:
    def __init__(self, *, clock: Callable[[], float] = time.perf_counter, window: int = 50) -> None:
        self._clock = clock
        self._paused_s = 0.0
        self._ends: deque[float] = deque([clock()], maxlen=window + 1)

    def step_ended(self) -> None:
        self._ends.append(self._clock() - self._paused_s)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Around what is no part of a step: evaluation, samples, saving."""
        began = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - began

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, of the last ones; None before the first."""
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) if len(self._ends) > 1 else None
