"""Records the order in which a pass uses units, and predicts the next pass from it.

A pass begins with the call of the model and ends where the next one begins; its backward belongs to it. Passes with and
without gradients are remembered separately, so that an evaluation does not spoil the prediction for training. The
prediction only serves to prefetch and to choose what to evict: any other order works too, and is remembered.

Before the first pass, the prediction is: forward in the order of the model's modules, backward in reverse.

The road not taken: a fixed schedule compiled from the first pass. It is faster by microseconds, and wrong as soon as a
user skips a block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator


class Order:
    """Positions count uses since the pass began. Consecutive uses of one unit count as one, except where backward
    begins."""

    def __init__(self, count: int) -> None:
        forward = list(range(count))
        self._remembered = {True: forward + forward[::-1], False: forward}
        self._training = True
        self._present: list[int] = []
        self._latest: tuple[int, bool] | None = None
        self.at = -1  # the position of the last use in the remembered pass
        self.jumps = 0  # uses that were not the predicted ones, and beginnings of passes
        self._passes, self._passes_per_step = 0, 1
        self._follow(self._remembered[True])

    def begin(self, training: bool) -> None:
        """Begin a pass; ``training``: gradients may follow."""
        if self._present:
            self._remembered[self._training] = self._present
        self._training, self._present, self._latest = training, [], None
        self._passes += training
        self._follow(self._remembered[training])

    def end_step(self) -> None:
        """The optimizer step was called: count its passes."""
        self._passes_per_step, self._passes = max(1, self._passes), 0

    @property
    def step_comes(self) -> bool:
        """Whether a step should follow this pass, by the last step's count of passes."""
        return self._passes >= self._passes_per_step

    def starts_with(self, units: Collection[int]) -> bool:
        """Whether the remembered pass began with one of ``units``, and this pass is past its first use."""
        return bool(self._past) and self._past[0] in units and self.at >= 0

    def visit(self, unit: int, *, backward: bool = False) -> None:
        """Record that ``unit`` is used now, in forward or in backward."""
        if self._latest == (unit, backward):
            return
        self._latest = (unit, backward)
        self._present.append(unit)
        places, before = self._places.get(unit), self.at
        if places:
            later = bisect_right(places, self.at)
            self.at = places[later] if later < len(places) else places[0]
        self.jumps += self.at != before + 1

    def upcoming(self) -> Iterator[tuple[int, int, bool]]:
        """(unit, distance, whether still in this pass) of the next predicted uses, each unit once."""
        seen: set[int] = set()
        length = len(self._past)
        for distance in range(1, length + 1):
            unit = self._past[(self.at + distance) % length]
            if unit not in seen:
                seen.add(unit)
                yield unit, distance, self.at + distance < length

    def distance(self, unit: int) -> float:
        """How many uses away the next use of ``unit`` is; infinite if it was never used."""
        places = self._places.get(unit)
        if not places:
            return float("inf")
        later = bisect_right(places, self.at)
        return places[later] - self.at if later < len(places) else len(self._past) + places[0] - self.at

    def comes_again(self, unit: int) -> bool:
        """Whether this pass should use ``unit`` again."""
        places = self._places.get(unit)
        return places is not None and places[-1] > self.at

    def _follow(self, past: list[int]) -> None:
        self._past, self.at = past, -1
        self.jumps += 1
        self._places: dict[int, list[int]] = {}
        for position, unit in enumerate(past):
            self._places.setdefault(unit, []).append(position)
