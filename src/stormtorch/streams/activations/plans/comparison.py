"""Decides which of two plans is faster, from the times of steps that ran with each.

A plan is made from counts of kernels, links and bytes; the time of a step depends on the host and the allocator too. So
a plan that should be faster replaces the simple one only after it was measured to be. The two take turns, several steps
each. Two turns, one by each plan, are a pair, and the second pair has the other order: on a machine that gets slower or
faster meanwhile, each plan is favoured once. The first step of each turn is not counted: the host runs ahead of the
device and then waits for the turn before.

Where the host is the limit, steps of one plan differ by a tenth and more. So the second plan must be faster in every
pair, and overall by 2 %, or by more where steps differ more. If it is clearly slower in the first pair, the comparison
ends. A good plan that is refused costs some speed. A bad plan that is taken makes "auto" slower than "recompute".

A second plan that only leaves work out, by keeping blocks where there is room, should never be slower. Its gain may be
smaller than what steps differ by: it has more pairs, and is taken if it is faster in the median. Where inputs differ in
size from step to step there are more pairs too, and times are taken per byte of input."""

from __future__ import annotations

import math
import statistics

TURN = 3  # steps
_PAIRS, _PAIRS_IF_UNCLEAR = 2, 4
_UNEVEN = 1.1
_WINS = 0.98  # of the simple plan's time
_LOSES = 1.03  # in the first pair


class Comparison:
    """``second`` says whether the next step should run with the second plan; ``is_over`` that there is a verdict."""

    def __init__(self, *, does_less: bool = False) -> None:
        """``does_less``: the second plan leaves out a part of the first one's work, and adds none."""
        self._does_less = does_less
        self._turns: list[list[float]] = []  # seconds for each byte; first, second, second, first, and so on
        self._sizes: list[int] = []
        self._steps = 0

    @property
    def second(self) -> bool:
        return _is_second(self._steps // TURN)

    @property
    def is_over(self) -> bool:
        pairs = self._steps / (2 * TURN)
        if self._is_uneven or self._does_less:
            return pairs >= _PAIRS_IF_UNCLEAR
        return pairs >= _PAIRS or (pairs == 1 and self.ratio > _LOSES)

    @property
    def second_wins(self) -> bool:
        faster = [ratio < 1 for ratio in self._ratios()]
        if self._does_less:
            return len(faster) >= _PAIRS and self.ratio < 1
        missed = 1 if self._is_uneven else 0
        is_clear = self.ratio < min(_WINS, 1 - self._error)
        return len(faster) >= _PAIRS and is_clear and faster.count(False) <= missed

    @property
    def ratio(self) -> float:
        """The second plan's time as a fraction of the first one's."""
        return statistics.median(self._ratios() or [1.0])

    @property
    def _error(self) -> float:
        """The standard error of ``ratio``, from how much the steps of a turn differ."""
        turns = [(times, statistics.median(times)) for times in self._turns if len(times) > 1]
        off = [(time / middle - 1) ** 2 for times, middle in turns for time in times if middle]
        if not off:
            return 0.0
        # Corrects for the number of counted steps in a turn and for their mean.
        variance = statistics.mean(off) * (TURN - 1) / (TURN - 2)
        return math.sqrt(variance * 2 / (len(off) / 2))

    @property
    def _is_uneven(self) -> bool:
        return bool(self._sizes) and max(self._sizes) > _UNEVEN * min(self._sizes)

    def _ratios(self) -> list[float]:
        """The ratio of each complete pair."""
        found = []
        for number in range(0, len(self._turns) - 1, 2):
            pair = self._turns[number : number + 2]
            first, second = reversed(pair) if _is_second(number) else pair
            if first and second and (of_first := statistics.median(first)):
                found.append(statistics.median(second) / of_first)
        return found

    def end_step(self, seconds: float, size: int) -> None:
        """Note the time of a step with inputs of ``size`` bytes, run by the plan that ``second`` named."""
        if self._steps % TURN == 0:
            self._turns.append([])
        elif size:
            self._turns[-1].append(seconds / size)
            self._sizes.append(size)
        self._steps += 1


def _is_second(turn: int) -> bool:
    return turn % 4 in (1, 2)
