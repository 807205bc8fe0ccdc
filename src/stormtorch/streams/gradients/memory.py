"""RAM for gradients: a home for each unit, or a ring for those that an update takes at once.

With step="backward" a unit's gradients exist from their store to the update that follows it. So they pass through a
ring, if RAM has no room for all of them. What has to remain there all the same has a home of the unit's own, taken when
it first comes: gradients of parameters that are in no optimizer, those that user code assigns or that come through
hooks, those of a backward inside of another, those of an update that failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from ...core.errors import OutOfBudget
from ...memory.host.arena import HostArena, untouched
from ...memory.lanes.lane import Lane
from ..units.unit import Place, Unit
from ..weights.residency import HomeGate

Take = Callable[["int | Sequence[int]"], HostArena]
"""Takes page-locked RAM, charged to gradients; it ends with the session."""


class GradMemory:
    """A home for the gradients of each unit, all of them taken before the first gradient is stored."""

    is_ring = False

    def __init__(self, units: Sequence[Unit], take: Take, regions: Sequence[int]) -> None:
        """``regions``: of all homes."""
        self._units, self._take, self._regions = units, take, regions
        self._own: dict[int, torch.Tensor] = {}  # by unit
        self._wide: dict[int, torch.Tensor] = {}
        self._spent = untouched(0)

    def prepare(self) -> None:
        """Take what is certain to be needed, if it has not been taken yet."""
        if not self._own:
            arena = self._take(self._regions)
            self._own = {unit.index: arena.tensor((unit.grad_bytes,), torch.uint8) for unit in self._units}

    def own(self, unit: Unit) -> torch.Tensor:
        """The unit's home in the parameters' dtypes."""
        self.prepare()
        return self._own[unit.index]

    def wide(self, unit: Unit) -> torch.Tensor:
        """The unit's home in fp32, taken when it is first needed."""
        if unit.index not in self._wide:
            self._wide[unit.index] = self._take(unit.wide_bytes).tensor((unit.wide_bytes,), torch.uint8)
        return self._wide[unit.index]

    @property
    def has_wide(self) -> bool:
        """Whether any unit has a home in fp32."""
        return bool(self._wide)

    def lend(self, unit: Unit, gate: HomeGate, store: Lane) -> torch.Tensor:
        """Bytes for gradients in the parameters' dtypes, until the update that ``gate`` will have. ``store`` waits for
        earlier updates that read these bytes."""
        gate.hold(store)
        return self.own(unit)

    def home_bytes_of(self, unit: Unit) -> int:
        """Bytes of the unit's homes."""
        return unit.grad_bytes + (unit.wide_bytes if unit.index in self._wide else 0)

    def spent(self, place: Place) -> torch.Tensor:
        """A tensor of the form of a gradient that an update in backward has used; its values are never read."""
        if self._spent.nbytes < place.unit.grad_bytes:
            self._spent = untouched(max(unit.grad_bytes for unit in self._units))
        return place.gradient(self._spent, wide=False)

    def forget(self) -> None:
        """Let go of memory."""
        self._own.clear()
        self._wide.clear()


class GradRing(GradMemory):
    """Gradients pass through a ring; a unit whose gradients remain gets a home when that first happens."""

    is_ring = True

    def __init__(self, units: Sequence[Unit], take: Take, ring_bytes: int) -> None:
        super().__init__(units, take, ())
        self._ring_bytes = ring_bytes
        self._ring = untouched(0)
        self._end = 0  # of the part lent last, counted on from turn to turn
        self._lent: deque[tuple[int, HomeGate]] = deque()  # parts of the latest turn: their start, and who reads them

    def prepare(self) -> None:
        if not self._ring.nbytes and self._ring_bytes:
            self._ring = self._take(self._ring_bytes).tensor((self._ring_bytes,), torch.uint8, alignment=64)

    def own(self, unit: Unit) -> torch.Tensor:
        if unit.index not in self._own:
            try:
                self._own[unit.index] = self._take(unit.grad_bytes).tensor((unit.grad_bytes,), torch.uint8)
            except OutOfBudget as error:
                raise OutOfBudget(
                    f"Cannot keep the gradients of {unit.name!r} in RAM",
                    error.numbers,
                    error.limit,
                    'Raise it. step="backward" has RAM for gradients only until the update that follows them. These '
                    "remain: their parameters have hooks, are in no optimizer, or got gradients that an update could "
                    "not take at once.",
                ) from error
        return self._own[unit.index]

    def lend(self, unit: Unit, gate: HomeGate, store: Lane) -> torch.Tensor:
        """Parts are lent in turn. What waits is ``store`` alone, and it waits for updates whose gradients it has stored
        before: these need nothing that comes after."""
        self.prepare()
        gate.hold(store)  # the worker must not begin the unit's next update before it has ended the last one
        size, start = unit.grad_bytes, self._end % self._ring_bytes
        if start + size > self._ring_bytes:  # a part lies in one piece
            self._end += self._ring_bytes - start
            start = 0
        while self._lent and self._lent[0][0] < self._end + size - self._ring_bytes:
            self._lent[0][1].hold(store)
            self._lent.popleft()
        self._lent.append((self._end, gate))
        self._end += size
        return self._ring[start : start + size]

    def home_bytes_of(self, unit: Unit) -> int:
        own, wide = self._own.get(unit.index), self._wide.get(unit.index)
        return sum(home.nbytes for home in (own, wide) if home is not None)

    def forget(self) -> None:
        super().forget()
        self._lent.clear()
        self._ring = untouched(0)
