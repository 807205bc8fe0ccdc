"""Updates *ahead*: begun in backward, into spare memory, for the step to take over.

With step="forward" the optimizer waits for the step, which may clip, skip or change what it likes. The CPU has little
to do until then, and the next forward waits for it. An update ahead reads a unit's weights, states and gradients as
soon as these are at home, and writes the result to a *spare*: a second set of states, and a second image. Nothing that
user code can see has changed. If the step then asks for exactly this update, the sets change places and the worker
copies the weights home, a sixth of the bytes of an update. Otherwise the result is dropped: it costs the work alone.

The road not taken: to update in place, with a log of the old values. It needs as much memory, and every look of user
code at weights or states before the step would have to take the update back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ....memory.host.arena import HostArena
from ....memory.lanes.flags import Flag
from ....native import flag_words
from ....native.worker.jobs import FlagValue
from ...gradients.home import GradHome, GradState
from ...units.unit import Unit
from .home import AdamHome, Run
from .state_home import StateHome, States

_REST = 8  # steps without updates ahead after one that has clipped
_LATE = 3  # steps at whose begin a unit's update was not done, after which it has none ahead any more


def spare_bytes(unit: Unit) -> list[int]:
    """The bytes of a unit's spare: exp_avg, exp_avg_sq, masters and image."""
    return [unit.state_count * 4, unit.state_count * 4, unit.master_bytes, unit.image_bytes]


@dataclass(eq=False)
class Begun:
    """An update ahead, and what it was made from."""

    runs: list[Run]
    flags: list[tuple[Flag, int]]  # of each run: it is done
    states: States  # the spare ones
    image: torch.Tensor
    present: frozenset[int]  # places that had a gradient
    wide: bool
    arrivals: int  # of the gradients
    version: int  # of the weights

    def is_of(self, runs: list[Run], grads: GradHome, version: int) -> bool:
        """Whether it is the update that the step asks for, of the same gradients and weights."""
        return (
            self.arrivals == grads.arrivals
            and self.version == version
            and self.wide == grads.is_wide
            and self.present == grads.present
            and all(map(grads.has_norm, grads.present))  # user code has not written them
            and _named(self.runs) == _named(runs)
        )

    @property
    def is_done(self) -> bool:
        return all(flag.at(value).reached() for flag, value in self.flags)


def _named(runs: Iterable[Run]) -> list[tuple[int, int, object]]:
    return [(run.first.index, run.last.index, run.step) for run in runs]


@dataclass(eq=False)
class _Parts:
    """How many backward passes bring gradients of a unit before a step: the last one is the one to begin at."""

    now: int = 0
    before_step: int = 0
    late: int = 0


@dataclass(eq=False)
class Ahead:
    """The units that have a spare, and whether the next updates are worth beginning."""

    state_home: StateHome
    images: dict[int, torch.Tensor] = field(default_factory=dict)  # spare ones, by unit
    begun: int = 0  # updates, so far
    taken_over: int = 0
    _parts: dict[int, _Parts] = field(default_factory=dict)
    rest: int = 0  # steps that begin none
    _before: tuple[int, int] = (0, 0)  # updates begun, and taken over, until the last step
    _were_offered: bool = False  # to that step
    # Says to jobs that have not begun that nobody wants them any more.
    _word: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int32, device="cpu"))
    _aborts: int = 0

    def add(self, units: Sequence[Unit], arena: HostArena) -> None:
        """Give these units spares, of ``arena``, which was made for them (`spare_bytes`)."""
        for unit in units:
            *parts, image = (arena.at(arena.allocate(size)) for size in spare_bytes(unit))
            self.state_home.give_spare(unit, parts)
            self.images[unit.index], self._parts[unit.index] = image, _Parts()

    @property
    def abort(self) -> FlagValue:
        """The flag by which `give_up` drops jobs that have not begun."""
        return FlagValue(self._word.data_ptr(), self._aborts + 1, owner=self._word)

    def wants(self, home: AdamHome, grads: GradHome, *, added: bool) -> bool:
        """Whether to begin the unit's update now. ``added``: its gradients were added to earlier ones.

        Earlier jobs of the unit are over when its gradients have arrived: the store lane waits for them."""
        parts = self._parts.get(home.unit.index)
        if parts is None:
            return False
        parts.now = parts.now + 1 if added else 1
        return (
            parts.now == parts.before_step
            and parts.late < _LATE
            and not self.rest
            and not home.on_device
            and home.waiting is None
            and len(grads.present) == len(home.unit.trained)  # the whole set of states changes places
            and grads.state in (GradState.AT_HOME, GradState.WIDE)
            and all(map(grads.has_norm, grads.present))
        )

    def begins(self, home: AdamHome, begun: Begun) -> None:
        """Note an update that the worker has got."""
        home.ahead = begun
        self.begun += 1

    def give_up(self, homes: Iterable[AdamHome]) -> None:
        """Drop all that were begun, and begin none for some steps: gradients are clipped, and will be again."""
        self.rest = _REST
        begun = [home for home in homes if home.ahead is not None]
        if begun:
            self._aborts += 1
            flag_words.store(self._word.data_ptr(), self._aborts)
        for home in begun:
            home.ahead = None  # its job may still run, and read the states: `HomeGate` knows

    def step_begins(self) -> None:
        """The step is about to update units."""
        begun, taken_over = self._before
        if self._were_offered and self.taken_over == taken_over:
            self.rest = _REST  # all in vain: user code does something else with its gradients
        self._were_offered, self._before = self.begun > begun, (self.begun, self.taken_over)
        self.rest = max(0, self.rest - 1)

    def step_asks(self, home: AdamHome) -> None:
        """The step updates the unit."""
        parts = self._parts.get(home.unit.index)
        if parts is not None:
            parts.before_step, parts.now = parts.now, 0
            if home.ahead is not None:
                parts.late = 0 if home.ahead.is_done else parts.late + 1

    def forget(self) -> None:
        """Release memory."""
        self.images.clear()
        self._parts.clear()
