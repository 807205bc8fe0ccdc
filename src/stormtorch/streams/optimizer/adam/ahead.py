"""Updates *ahead*: begun in backward, into spare memory, for the step to take over.

With step="forward" the optimizer waits for the step, which may clip, skip or change what it likes. The CPU has little
to do until then, and the next forward waits for it. An update ahead reads a unit's weights, states and gradients as
soon as these are at home, and writes the result to a *spare*: a second set of states, and a second image. Nothing that
user code can see has changed. If the step then asks for exactly this update, the sets change places and the worker
copies the weights home, a sixth of the bytes of an update. Otherwise the result is dropped: it costs the work alone.

The road not taken: to update in place, with a log of the old values. It needs as much memory, and every look of user
code at weights or states before the step would have to take the update back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from ....memory.host.arena import HostArena, regions_for
from ....memory.lanes.flags import Flag, Flags
from ....native import flag_words
from ....native.update import WeightCopy
from ....native.worker.jobs import FlagValue, Worker
from ...gradients.home import GradHome, GradState
from ...units.unit import Unit
from .home import AdamHome, AdamState, Buffers, Run, bound
from .state_home import StateHome, States

_REST = 8  # steps without updates ahead after one that has clipped
_LATE = 3  # steps in a row at whose begin a unit's update was not done, after which it has none ahead ...
_LATE_REST = 50  # ... for so many


def spare_bytes(unit: Unit) -> list[int]:
    """The bytes of a unit's spare: exp_avg, exp_avg_sq, masters and image."""
    return [unit.state_count * 4, unit.state_count * 4, unit.master_bytes, unit.home_bytes]


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


class Ahead:
    """The units that have a spare, and the updates that were begun."""

    def __init__(
        self,
        homes: list[AdamHome],
        state_home: StateHome,
        *,
        images: list[torch.Tensor],
        worker: Worker,
        board: Flags,
        take: Callable[[list[int]], HostArena],
    ) -> None:
        """``take``: gives RAM for spares."""
        self._homes, self._state_home, self._images = homes, state_home, images
        self._worker, self._board, self._take = worker, board, take
        self.begun = self.taken_over = 0  # updates, so far
        self.rest = 0  # steps that begin none
        self._units: dict[int, _Unit] = {}
        self._arenas: list[HostArena] = []
        self._never: set[int] = set()  # units
        self._before = 0, 0  # updates begun, and taken over, until the last step
        self._were_offered = False  # to that step
        # Drops the jobs of this step that have not begun. Each step has its own: a job that it took over must run.
        self._dropped = ctypes.c_uint32()

    # --- memory

    def spare(self, elements: float, most_bytes: int) -> None:
        """Backward brings the last units' gradients first: those get the memory, up to so many parameters in all.

        Units that the device updates have theirs when its work has been divided again."""
        units, taken = list[Unit](), 0
        for home in reversed(self._homes):
            unit, size = home.unit, sum(regions_for(spare_bytes(home.unit)))
            if unit.trained and home.state in (AdamState.HOME, AdamState.PASSING) and not home.has_spare:
                elements, taken = elements - unit.state_count, taken + size
                if elements < 0 or taken > most_bytes:
                    break
                units.append(unit)
        if not units:
            return
        arena = self._take(regions_for(size for unit in units for size in spare_bytes(unit)))
        self._arenas.append(arena)
        for unit in units:
            *parts, image = (arena.at(arena.allocate(size)) for size in spare_bytes(unit))
            self._state_home.give_spare(unit, parts)
            self._units[unit.index] = _Unit(image)
            self._homes[unit.index].has_spare = True

    @property
    def units(self) -> list[Unit]:
        """Those that have a spare."""
        return [self._homes[index].unit for index in self._units]

    @property
    def spare_bytes(self) -> int:
        """The RAM of all spares."""
        return sum(arena.capacity_bytes for arena in self._arenas)

    def image(self, unit: Unit) -> torch.Tensor:
        """The unit's spare image."""
        return self._units[unit.index].image

    def stop(self) -> None:
        """Give all spares up. The states of all units are up to date where they are shown."""
        units = self.units
        self._units.clear()
        for unit in units:
            self._homes[unit.index].taken, self._homes[unit.index].has_spare = None, False
            self._state_home.take_spare(unit)
        while self._arenas:
            self._arenas.pop().close()

    def forget(self) -> None:
        """Release memory."""
        self._units.clear()

    # --- in backward

    def never(self, home: AdamHome) -> None:
        """User code has got an array over memory of the unit, and may write there without our notice."""
        self._never.add(home.unit.index)
        home.ahead = None

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

    def begin(self, home: AdamHome, runs: list[Run], grads: GradHome, version: int) -> None:
        """Queue the unit's update. ``version``: of its weights."""
        unit, flags = home.unit, list[tuple[Flag, int]]()
        states, spare = self._state_home.acquire(unit, home.whole), self._state_home.spare(unit)
        image, abort = self._units[unit.index].image, FlagValue(ctypes.addressof(self._dropped), 1, owner=self._dropped)
        for run in runs:
            source, target = (
                bound(run, Buffers(i, s, grads.flat()), wide=grads.is_wide, factor=None)
                for i, s in ((self._images[unit.index], states), (image, spare))
            )
            if source is None or target is None:
                break  # it has no elements, which is rare: nothing is worth beginning
            flag, value = home.next_flag(run)
            self._worker.submit(
                target.made_from(source),
                run.step,
                # After what a step has asked for; and those first that the next forward needs first.
                priority=len(self._homes) + unit.index,
                ready=grads.arrived.at(grads.arrivals),
                done=flag.at(value),
                abort=abort,
            )
            home.gate.runs.append((flag, value))  # it reads weights, states and gradients
            flags.append((flag, value))
        self._state_home.release(states, dirty=False, after=home.gate)
        home.ahead_flags = flags
        if len(flags) == len(runs):
            present, wide = frozenset(grads.present), grads.is_wide
            home.ahead = Begun(runs, flags, spare, image, grads.flat(), present, wide, grads.arrivals, version)
            self.begun += 1

    # --- in the step

    def step_begins(self) -> None:
        """The step is about to update units."""
        begun, taken_over = self._before
        if self._were_offered and self.taken_over == taken_over:
            self.rest = _REST  # all in vain: user code does something else with its gradients
        self._were_offered, self._before = self.begun > begun, (self.begun, self.taken_over)
        self.rest = max(0, self.rest - 1)

    def give_up(self) -> None:
        """Drop all that were begun, and begin none for some steps: gradients are clipped, and will be again."""
        self.rest = _REST
        flag_words.store(ctypes.addressof(self._dropped), 1)
        self._dropped = ctypes.c_uint32()
        for home in self._homes:
            home.ahead = None  # its job may still run, and read the states

    def step_is_decided(self) -> None:
        """The step takes over what was begun, or has given it up."""
        if self._were_offered:
            self._dropped = ctypes.c_uint32()

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

    def take_over(self, home: AdamHome, begun: Begun, grads: GradHome) -> None:
        """Take what an update has made, or will have made: its states at once, its weights by copies, which begin when
        ``grads.arrived`` says that no load reads the old ones."""
        self.taken_over += 1
        unit, priority = home.unit, home.unit.index
        for run, (made, value) in zip(begun.runs, begun.flags, strict=True):
            source, target = (
                bound(run, Buffers(image, begun.states, begun.grads), wide=begun.wide, factor=None)
                for image in (begun.image, self._images[unit.index])
            )
            assert source is not None
            assert target is not None
            flag, next_value = home.next_flag(run)
            copy = self._worker.copy(
                WeightCopy(target.weight, source.weight),
                priority=priority,
                ready=made.at(value),
                also=grads.arrived.at(grads.arrivals),
                done=flag.at(next_value),
                abort=self._board.aborted.at(1),
                dropped=begun.dropped,
            )
            begun.copies.append(copy)
            home.gate.runs.append((flag, next_value))
        self._state_home.exchange(unit)
        home.taken, home.ahead_flags = begun, []

    # --- at the end

    def mend(self) -> None:
        """Give units the states of their weights, after the worker has ended: perhaps neither an update that the last
        step took over nor the copy of its weights was done."""
        for home in self._homes:
            begun, home.taken = home.taken, None
            if begun is None:
                continue
            self._state_home.exchange(home.unit)
            states, image = self._state_home.acquire(home.unit, home.whole), self._images[home.unit.index]
            for run, copy in zip(begun.runs, begun.copies, strict=False):
                if copy in begun.dropped:
                    continue
                here, made = (
                    bound(run, Buffers(image, each, begun.grads), wide=begun.wide, factor=None)
                    for each in (states, begun.states)
                )
                assert here is not None
                assert made is not None
                for name in ("exp_avg", "exp_avg_sq", "master"):
                    if (target := getattr(here, name)) is not None:
                        target.copy_(getattr(made, name))
