"""A second kind of `StateHome`, as a disk would be one: lends copies that are filled late, takes back dirty ones late,
and overwrites with NaN what it has taken back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stormtorch.core.tags import Tag
from stormtorch.memory.host.arena import HostArena
from stormtorch.memory.lanes.lane import Delay, Event
from stormtorch.memory.lanes.thread import ThreadLane
from stormtorch.streams.optimizer.adam.state_home import RamHome, States
from stormtorch.streams.units.chunks import Chunk, whole_of
from stormtorch.streams.units.unit import Place, Unit
from stormtorch.streams.weights.residency import HomeGate


class CopyingHome:
    """``stored`` plays the file: only this class ever touches it."""

    def __init__(self, units: list[Unit], arena: HostArena, delay: Delay | None = None) -> None:
        self.stored = RamHome(units, arena)
        self.lane = ThreadLane("states", delay=delay)
        self.lent: list[States] = []
        self.taken_back = 0
        self._shown = {unit.index: _garbage(unit, whole_of(unit)) for unit in units}

    def acquire(self, unit: Unit, chunk: Chunk, *, read: bool = True) -> States:
        states = _garbage(unit, chunk)
        for target, source in zip(states.parts, self.stored.acquire(unit, chunk).parts, strict=True):
            if read:
                self.lane.copy(target, source, Tag.OPTIMIZER)
            else:
                self.lane.fill(target, 0xFF)
        states.ready = self.lane.record()
        self.lent.append(states)
        return states

    def release(self, states: States, *, dirty: bool, after: Event | HomeGate | None = None) -> None:
        self.lent = [other for other in self.lent if other is not states]
        if isinstance(after, HomeGate):
            after.hold(self.lane)
        elif after is not None:
            self.lane.wait(after)
        if dirty:
            self.taken_back += 1
            for target, source in zip(self.stored.acquire(states.unit, states.chunk).parts, states.parts, strict=True):
                self.lane.copy(target, source, Tag.OPTIMIZER)
        for part in states.parts:
            self.lane.fill(part, 0xFF)

    def stored_tensor(self, place: Place, name: str) -> None:
        """Its states are not in a file."""

    def shown(self, place: Place) -> dict[str, torch.Tensor]:
        self.refresh(place.unit)
        return self._shown[place.unit.index].of(place)

    def refresh(self, unit: Unit) -> None:
        self.lane.synchronize()
        stored = self.stored.acquire(unit, whole_of(unit))
        for target, source in zip(self._shown[unit.index].parts, stored.parts, strict=True):
            target.copy_(source)

    def written(self, place: Place) -> None:
        self.lane.synchronize()
        shown = self._shown[place.unit.index].of(place)
        for name, target in self.stored.shown(place).items():
            target.copy_(shown[name])

    def give_spare(self, unit: Unit, parts: Sequence[torch.Tensor]) -> None:
        raise NotImplementedError  # updates ahead are for states in RAM

    def take_spare(self, unit: Unit) -> None:
        raise NotImplementedError

    def spare(self, unit: Unit) -> States:
        raise NotImplementedError

    def exchange(self, unit: Unit) -> None:
        raise NotImplementedError

    def is_exchanged(self, unit: Unit) -> bool:  # noqa: ARG002
        return False

    def forget(self) -> None:
        self.lane.close()
        self.stored.forget()
        self._shown.clear()


def _garbage(unit: Unit, chunk: Chunk) -> States:
    return States(unit, chunk, [torch.full((size,), 0xFF, dtype=torch.uint8) for size in chunk.sizes[:3]])
