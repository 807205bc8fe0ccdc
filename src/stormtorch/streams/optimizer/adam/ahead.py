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
_LATE = 3  # steps in a row at whose begin a unit's update was not done, after which it has none ahead ...
_LATE_REST = 50  # ... for so many


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
    grads: torch.Tensor
    present: frozenset[int]  # places that had a gradient
    wide: bool
    arrivals: int  # of the gradients
    version: int  # of the weights
    copies: list[int] = field(default_factory=list)  # of each run: the ticket of the job that copies its weights home
    dropped: set[int] = field(default_factory=set)  # those tickets of which no job was run

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
class _Unit:
    """What is known of a unit that has a spare."""

    image: torch.Tensor  # the spare one
    parts: int = 0  # backward passes that have brought gradients since the last step
    parts_before: int = 0  # the same, when that step came: the last one is the one to begin at
    late: int = 0  # steps in a row whose begin the update was not done at
    rest: int = 0  # steps that leave the unit out


def _word() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device="cpu")


@dataclass(eq=False)
class Ahead:
    """The units that have a spare, and whether the next updates are worth beginning."""

    state_home: StateHome
    begun: int = 0  # updates, so far
    taken_over: int = 0
    rest: int = 0  # steps that begin none
    _units: dict[int, _Unit] = field(default_factory=dict)
    _never: set[int] = field(default_factory=set)  # units
    _before: tuple[int, int] = (0, 0)  # updates begun, and taken over, until the last step
    _were_offered: bool = False  # to that step
    # Says to jobs of this step that have not begun that nobody wants them. Each step has its own: a job that a step has
    # taken over must run.
    _dropped: torch.Tensor = field(default_factory=_word)

    def add(self, units: Sequence[Unit], arena: HostArena) -> None:
        """Give these units spares, of ``arena``, which was made for them (`spare_bytes`)."""
        for unit in units:
            *parts, image = (arena.at(arena.allocate(size)) for size in spare_bytes(unit))
            self.state_home.give_spare(unit, parts)
            self._units[unit.index] = _Unit(image)

    def has(self, unit: Unit) -> bool:
        """Whether the unit has a spare."""
        return unit.index in self._units

    @property
    def units(self) -> list[int]:
        """The indices of units that have one."""
        return list(self._units)

    def image(self, unit: Unit) -> torch.Tensor:
        """The unit's spare image."""
        return self._units[unit.index].image

    @property
    def abort(self) -> FlagValue:
        """The flag by which `give_up` drops jobs that have not begun."""
        return FlagValue(self._dropped.data_ptr(), 1, owner=self._dropped)

    def never(self, unit: Unit) -> None:
        """User code has got an array over memory of the unit, and may write there without our notice."""
        self._never.add(unit.index)

    def wants(self, home: AdamHome, grads: GradHome, *, added: bool) -> bool:
        """Whether to begin the unit's update now. ``added``: its gradients were added to earlier ones.

        Earlier jobs of the unit are over when its gradients have arrived: the store lane waits for them."""
        unit = self._units.get(home.unit.index)
        if unit is None:
            return False
        unit.parts = unit.parts + 1 if added else 1
        return (
            unit.parts == unit.parts_before
            and not unit.rest
            and not self.rest
            and not home.on_device
            and home.waiting is None
            and home.unit.index not in self._never
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
        flag_words.store(self._dropped.data_ptr(), 1)
        self._dropped = _word()
        for home in homes:
            home.ahead = None  # its job may still run, and read the states

    def step_begins(self) -> None:
        """The step is about to update units."""
        begun, taken_over = self._before
        if self._were_offered and self.taken_over == taken_over:
            self.rest = _REST  # all in vain: user code does something else with its gradients
        self._were_offered, self._before = self.begun > begun, (self.begun, self.taken_over)
        self.rest = max(0, self.rest - 1)

    def step_is_decided(self) -> None:
        """The step takes over what was begun, or has given it up."""
        if self._were_offered:
            self._dropped = _word()

    def step_asks(self, home: AdamHome) -> None:
        """The step updates the unit."""
        unit = self._units.get(home.unit.index)
        if unit is None:
            return
        unit.parts_before, unit.parts = unit.parts, 0
        unit.rest = max(0, unit.rest - 1)
        if home.ahead is not None:
            unit.late = 0 if home.ahead.is_done else unit.late + 1
            if unit.late == _LATE:
                unit.late, unit.rest = 0, _LATE_REST

    def forget(self) -> None:
        """Release memory."""
        self._units.clear()
