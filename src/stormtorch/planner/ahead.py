"""Decides whether units are updated ahead of the step, in RAM of their own (streams/optimizer/adam/ahead.py), from
measurements: it pays where compute waits for updates, and the CPU has time in backward."""

from __future__ import annotations

import contextlib
import itertools
import statistics

from ..core.errors import OutOfBudget
from ..core.tags import Tier
from ..memory.books.ledger import Ledger
from ..native.worker.jobs import Worker
from ..observe.recorder import Recorder
from ..streams.optimizer.updater import Updater

_AT = 30  # steps after which it is decided: rates are known, and activations have taken the RAM that they need
_RECENT = 8  # steps that give a step's time
_LEAST_WAIT = 0.02  # of a step's time that compute waits for updates
_CAUSES = ("updates", "states")
# What the CPU can do in backward: that is half of a step which waits for updates, and an update into other memory takes
# one and a half times as long, since what is written must be read first.
_TIME, _SPEED = 0.5, 2 / 3
_RAM = 0.5  # at most, of what is free
_WITH, _WITHOUT = range(40, 45), range(46, 51)  # steps that are compared then; 45 to 50 begin no updates
_GAIN = 0.99  # of the time without and of that before, that a step must take to go on
_WATCHED, _LEAST_TAKEN = 100, 0.25  # so many steps must take over this part of what backward could have updated
_AGAIN = 500  # steps after which it is tried again; twice as many each time


class Sparing:
    """Gives units spare memory, and takes it back if steps do not become faster, or drop what was updated: those that
    clip do. Tries again much later."""

    def __init__(self, updater: Updater, worker: Worker, ledger: Ledger, recorder: Recorder) -> None:
        self._updater, self._worker, self._ledger, self._recorder = updater, worker, ledger, recorder
        self._later, self._again = 0, _AGAIN  # steps that this trial comes later than the first; until the next one
        self._before_s = 0.0  # of a step, before the trial
        self._taken = 0  # updates that steps had taken over when that was looked at last
        self.is_over = False  # the first trial

    def after_step(self, steps: int) -> bool:
        """``steps`` have ended since the optimizer's states could be copied by lanes. Whether units have got memory, or
        lost it."""
        steps -= self._later
        had = self._updater.ahead_units
        if steps == _AT:
            self._begin()
            if not self._updater.ahead_units:
                self._wait()
        elif not had:
            return False
        elif steps == _WITH[-1]:
            self._updater.pause_ahead(_WITHOUT[-1] - steps)
        elif steps == _WITHOUT[-1]:
            self.is_over, self._taken = True, self._updater.taken_over
            if not self._pays():
                self._stop()
        elif steps > _WITHOUT[-1] and (steps - _WITHOUT[-1]) % _WATCHED == 0:
            before, self._taken = self._taken, self._updater.taken_over
            if self._taken - before < _LEAST_TAKEN * had * _WATCHED:
                self._stop()
        return self._updater.ahead_units != had

    def _stop(self) -> None:
        self._updater.stop_ahead()
        self._wait()

    def _wait(self) -> None:
        self.is_over = True
        self._later, self._again = self._later + self._again, 2 * self._again

    def _begin(self) -> None:
        totals, worker = self._recorder.snapshot(), self._worker.stats()
        ends = totals.step_ends_s[-_RECENT:]
        if len(ends) < _RECENT or worker.busy_s <= 0:
            return
        step_s = self._before_s = statistics.median(b - a for a, b in itertools.pairwise(ends))
        waits_s = sum(totals.waits_s.get(cause, 0.0) for cause in _CAUSES) / len(totals.step_ends_s)  # since the first
        if waits_s < _LEAST_WAIT * step_s:
            return
        elements = worker.elements / (worker.busy_s / self._worker.threads) * _SPEED * _TIME * step_s
        with contextlib.suppress(OutOfBudget):  # other programs have taken the RAM
            self._updater.spare(elements, int(self._ledger.free_bytes(Tier.HOST) * _RAM))

    def _pays(self) -> bool:
        ends = self._recorder.snapshot().step_ends_s
        with_s, without_s = (_median_s(ends, _WITHOUT[-1] - steps[-1], len(steps)) for steps in (_WITH, _WITHOUT))
        # Without, the CPU has the updates of the units with a spare, which it shared with the device before.
        return with_s <= _GAIN * min(without_s, self._before_s)


def _median_s(ends: list[float], since: int, count: int) -> float:
    """The median time of ``count`` steps, the last of which was ``since`` steps ago."""
    last = len(ends) - since
    return statistics.median(b - a for a, b in itertools.pairwise(ends[last - count - 1 : last]))
