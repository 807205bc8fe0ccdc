"""Measures the pace of a run from its last steps, without the pauses between them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator

_FIRST = 5  # slower steps: torch allocates memory and chooses kernels


class Pace:
    def __init__(self, *, clock: Callable[[], float] = time.perf_counter, window: int = 50) -> None:
        self._clock = clock
        self._paused_s = 0.0
        self._ends: deque[float] = deque([clock()], maxlen=window + 1)
        self._steady_s = 0.0  # when the last of the first steps ended
        self.steps = 0

    def step_ended(self) -> None:
        self._ends.append(self._clock() - self._paused_s)
        self.steps += 1
        if self.steps == _FIRST:
            self._steady_s = self._ends[-1]

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the block from the pace: evaluation, samples, saving."""
        began = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - began

    @property
    def step_s(self) -> float | None:
        """Seconds per step, over the last steps; None before the first."""
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) if len(self._ends) > 1 else None

    @property
    def mean_step_s(self) -> float | None:
        """Seconds per step, over all but the first steps; None before those."""
        return (self._ends[-1] - self._steady_s) / (self.steps - _FIRST) if self.steps > _FIRST else None
