"""Which of two plans is faster, told by steps that ran with each.

A plan counts kernels, links and bytes; what a step takes depends on the host and the allocator too. So a plan that
should be faster replaces the simple one only after it was. The two take turns, several steps each, so that a machine
that gets slower or faster meanwhile favours neither. The first step of each turn is not counted: the host runs ahead of
the device, and what it waits for then is the turn before.

Inputs may differ in size from step to step. Times are taken for each byte of input, and where sizes vary there are
more turns."""

from __future__ import annotations

import statistics

TURN = 3  # steps
_PAIRS, _PAIRS_IF_UNEVEN = 2, 4  # of turns
_UNEVEN = 1.1
_WINS = 0.99  # of the simple plan's time
_CLEAR = (0.9, 1.03)  # less or more than that after one turn each needs no second one


class Comparison:
    """``second`` says whether the next step should run with the second plan; ``is_over`` that there is a verdict."""

    def __init__(self) -> None:
        self._times: tuple[list[float], list[float]] = ([], [])  # seconds for each byte, of the first and the second
        self._sizes: list[int] = []
        self._steps = 0

    @property
    def second(self) -> bool:
        return self._steps // TURN % 2 == 1

    @property
    def is_over(self) -> bool:
        uneven = bool(self._sizes) and max(self._sizes) > _UNEVEN * min(self._sizes)
        pairs = self._steps / (2 * TURN)
        is_clear = not uneven and pairs == 1 and not _CLEAR[0] < self.ratio < _CLEAR[1]
        return is_clear or pairs >= (_PAIRS_IF_UNEVEN if uneven else _PAIRS)

    @property
    def second_wins(self) -> bool:
        return self.ratio < _WINS

    @property
    def ratio(self) -> float:
        """The second plan's time, in parts of the first one's."""
        first, second = (statistics.median(times) for times in self._times)
        return second / first if first else 1.0

    def end_step(self, seconds: float, size: int) -> None:
        """A step with inputs of ``size`` bytes has ended, by the plan that ``second`` named."""
        if self._steps % TURN and size:
            self._times[self.second].append(seconds / size)
            self._sizes.append(size)
        self._steps += 1
