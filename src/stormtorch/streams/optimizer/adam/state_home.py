"""Keeps Adam's states between updates. `StateHome` is the interface; `RamHome` keeps them in RAM.

An update borrows the states of a chunk with `acquire`. It returns them with `release`, says there what still uses the
buffers and whether it writes them, and keeps no tensor of them. User code and checkpoints get one tensor for each state
of a parameter (`shown`), which remains valid.

disk_home.py keeps those of some units in files. It lends no buffers of them, since the CPU updates them on their way
through its own."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from ....memory.disk.stored import StoredTensor
from ....memory.host.arena import HostArena
from ....memory.lanes.lane import Event
from ....native.update import AdamTensors
from ...units.chunks import Chunk, whole_of
from ...units.unit import Place, Unit
from ...weights.residency import HomeGate
from ..updater import MASTER

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names of these states
SPLIT_DTYPE = {torch.bfloat16: torch.int16, torch.float16: torch.float32}  # of masters


class States:
    """The states of a chunk: in buffers that a home has lent, or on the device.

    ``parts``: the bytes of exp_avg, exp_avg_sq and masters. ``ready``: the event after which they are there; None: they
    are there already. ``bound``: the tensors of updates with these buffers, for the next step (home.py)."""

    __slots__ = ("bound", "chunk", "exp_avg", "exp_avg_sq", "masters", "parts", "ready", "unit")

    def __init__(self, unit: Unit, chunk: Chunk, parts: Sequence[torch.Tensor], ready: Event | None = None) -> None:
        self.unit, self.chunk, self.parts, self.ready = unit, chunk, parts[:3], ready
        self.exp_avg, self.exp_avg_sq = (part.view(torch.float32) for part in parts[:2])
        self.masters = parts[2]
        self.bound: dict[Hashable, AdamTensors] = {}

    def of(self, place: Place) -> dict[str, torch.Tensor]:
        """The states of one parameter, which lies in the chunk, by name. A split parameter has a master: the part of
        the fp32 weight beside the image, 16-bit remainders for bf16, whole fp32 weights for fp16."""
        at = place.state_at - self.chunk.states.start
        moments = zip(MOMENTS, (self.exp_avg, self.exp_avg_sq), strict=True)
        found = {name: flat[at : at + place.count].as_strided(place.shape, place.stride) for name, flat in moments}
        if place.is_split:
            at = place.master_at - self.chunk.masters.start
            found[MASTER] = place.view(self.masters, at, SPLIT_DTYPE[place.dtype])
        return found


class StateHome(Protocol):
    """Keeps the states of all units. Used by one thread at a time; no method waits unless it says so."""

    def acquire(self, unit: Unit, chunk: Chunk, *, read: bool = True) -> States:
        """Lend buffers with the states of a chunk, until ``release``; use them after their ``ready``.

        Not ``read``: the caller overwrites all of them, and their contents may be garbage."""

    def release(self, states: States, *, dirty: bool, after: Event | HomeGate | None = None) -> None:
        """Take the buffers back when ``after`` has passed; ``dirty``: they have, or will then have, new contents.

        ``after``: what still uses them: an event, or the unit's gate for updates by the worker; None: nothing."""

    def shown(self, place: Place) -> dict[str, torch.Tensor]:
        """The current states of a parameter by name, in the same memory at every call. May wait.

        They remain valid beyond the session. `refresh` brings them up to date, `written` takes what was written."""

    def refresh(self, unit: Unit) -> None:
        """Bring tensors of the unit that `shown` gave up to date with dirty releases. May wait."""

    def written(self, place: Place) -> None:
        """Store what the caller has written to the tensors that `shown` gave. May wait."""

    def give_spare(self, unit: Unit, parts: Sequence[torch.Tensor]) -> None:
        """Take a second set of buffers for the unit's states, for updates ahead (ahead.py)."""

    def take_spare(self, unit: Unit) -> None:
        """Give the second set up, after a `refresh`."""

    def spare(self, unit: Unit) -> States:
        """Those of the unit's two sets that do not have its states now."""

    def exchange(self, unit: Unit) -> None:
        """Take the spare set as the unit's states, when all work that was requested for it is done."""

    def is_exchanged(self, unit: Unit) -> bool:
        """Whether the unit's states are in the second set, which `refresh` ends."""

    def stored_tensor(self, place: Place, name: str) -> StoredTensor | None:
        """A state that lies in a file, for code that moves all of its bytes; None if it is to use `shown`."""

    def forget(self) -> None:
        """Release all memory but the tensors that `shown` gave."""


class RamHome:
    """States in RAM: lends and shows views of one arena, so that nothing moves."""

    def __init__(self, units: list[Unit], arena: HostArena) -> None:
        self._whole: dict[int, States] = {}  # those that are shown, by unit
        for unit in units:
            parts = [arena.tensor((unit.state_count,), torch.float32).view(torch.uint8) for _ in range(2)]
            parts.append(arena.tensor((unit.master_bytes,), torch.uint8))
            self._whole[unit.index] = States(unit, whole_of(unit), parts)
        self._second: dict[int, States] = {}  # of units that have a spare
        self._exchanged: set[int] = set()  # units whose states are in the second set
        self._cached: dict[tuple[int, bool, Chunk], States] = {}

    def acquire(self, unit: Unit, chunk: Chunk, *, read: bool = True) -> States:  # noqa: ARG002
        whole, is_second = self._now(unit), unit.index in self._exchanged
        if chunk == whole.chunk:
            return whole
        states = self._cached.get((unit.index, is_second, chunk))
        if states is None:
            moments = slice(4 * chunk.states.start, 4 * chunk.states.stop)
            which = (moments, moments, slice(chunk.masters.start, chunk.masters.stop))
            parts = [part[mine] for part, mine in zip(whole.parts, which, strict=True)]
            states = self._cached[unit.index, is_second, chunk] = States(unit, chunk, parts)
        return states

    def _now(self, unit: Unit) -> States:
        return self._second[unit.index] if unit.index in self._exchanged else self._whole[unit.index]

    def release(self, states: States, *, dirty: bool, after: Event | HomeGate | None = None) -> None:
        """The buffers are home memory itself."""

    def shown(self, place: Place) -> dict[str, torch.Tensor]:
        return self._whole[place.unit.index].of(place)

    def refresh(self, unit: Unit) -> None:
        """Views are up to date, unless the states are in the second set."""
        if unit.index in self._exchanged:
            for part, mine in zip(self._whole[unit.index].parts, self._second[unit.index].parts, strict=True):
                part.copy_(mine)
            self._exchanged.discard(unit.index)

    def written(self, place: Place) -> None:
        """Nothing to do: it was written to home memory."""
        assert place.unit.index not in self._exchanged, "written before a refresh"

    def give_spare(self, unit: Unit, parts: Sequence[torch.Tensor]) -> None:
        self._second[unit.index] = States(unit, whole_of(unit), parts)

    def take_spare(self, unit: Unit) -> None:
        assert unit.index not in self._exchanged, "taken before a refresh"
        del self._second[unit.index]
        self._whole[unit.index].bound.clear()  # which may have the spare image
        for key in [key for key in self._cached if key[0] == unit.index and key[1]]:
            del self._cached[key]

    def spare(self, unit: Unit) -> States:
        return self._whole[unit.index] if unit.index in self._exchanged else self._second[unit.index]

    def exchange(self, unit: Unit) -> None:
        self._exchanged ^= {unit.index}

    def is_exchanged(self, unit: Unit) -> bool:
        return unit.index in self._exchanged

    def stored_tensor(self, place: Place, name: str) -> StoredTensor | None:  # noqa: ARG002
        return None

    def forget(self) -> None:
        self._whole.clear()
        self._second.clear()
        self._cached.clear()
