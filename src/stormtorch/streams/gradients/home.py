"""One unit's gradients: where they lie, which are present, which graph nodes may add to them, which views exist."""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ...core.errors import StormError
from ...core.tags import Tag
from ...memory.lanes.build import Lanes
from ...memory.lanes.flags import Flag
from ...memory.lanes.lane import Event
from ..home.fetch import Token
from ..home.parameter import HomeView, move_views
from ..units.unit import Place, Unit
from ..weights.residency import HomeGate
from .memory import GradMemory


class GradState(enum.Enum):
    """Where a unit's gradients are, and what they occupy. Homes that have been taken remain taken in every state."""

    NONE = "none"  # nothing: homes hold garbage, or a store that is no longer wanted
    USED = "used"  # nothing: an update in backward has used them, and none came since
    ON_DEVICE = "on device"  # a bucket of the pool, or the unit's kept memory there; homes hold garbage
    PASSING = "passing"  # a part of the ring, until the update that follows at once; until ``stored``, also the bucket
    AT_HOME = "at home"  # the unit's own home, in the parameters' dtypes; until ``stored``, also the bucket
    WIDE = "wide"  # the unit's home in fp32; until ``stored``, also the bucket


@dataclass(eq=False)
class Partial:
    """Gradients that one backward pass has brought so far."""

    nested: bool  # reentrant checkpointing runs a pass inside of another
    grads: dict[int, torch.Tensor] = field(default_factory=dict)  # by place


@dataclass(eq=False)
class GradHome:
    """One unit's gradients; ``state`` says where they are."""

    unit: Unit
    arrived: Flag
    lanes: Lanes
    gate: HomeGate  # of its unit: an update may still read the gradients at home
    memory: GradMemory  # of all units
    passing: torch.Tensor | None = None  # the part of the ring where the gradients are
    is_wide: bool = False  # their form, on the device and at home
    present: set[int] = field(default_factory=set)  # indices of places
    # Places whose gradients an update in backward has used since they were last dropped: user code must not read those.
    consumed_places: set[int] = field(default_factory=set)
    given: dict[int, weakref.ref[HomeView]] = field(default_factory=dict)  # ``p.grad`` that user code got, by place
    latest: HomeView | None = None  # the last of these; most loops ask twice
    shared: set[int] = field(default_factory=set)  # places of which torch has delivered a part since they were dropped
    norms: dict[int, torch.Tensor] = field(default_factory=dict)  # on the device
    unmeasured: set[int] = field(default_factory=set)  # places whose norms `measure` has to compute
    norms_here: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]] | None = None  # ``norms``, and these on the CPU
    stored: Event | None = None
    there: torch.Tensor | None = None  # the gradients on the device; home memory does not have them yet
    ready: Event | None = None  # when compute has made those
    arrivals: int = 0  # the value of ``arrived`` that says the last store has ended
    partial: dict[int, Partial] = field(default_factory=dict)  # by pass; waits for more uses of the unit
    tokens: weakref.WeakSet[Token] = field(default_factory=weakref.WeakSet)  # of the nodes that may contribute

    @property
    def consumed(self) -> bool:
        return bool(self.consumed_places)

    @property
    def state(self) -> GradState:
        if self.there is not None:
            return GradState.ON_DEVICE
        if self.passing is not None:
            return GradState.PASSING
        if self.present:
            return GradState.WIDE if self.is_wide else GradState.AT_HOME
        return GradState.USED if self.consumed else GradState.NONE

    def flat(self) -> torch.Tensor:
        """The bytes of all gradients, where they are now."""
        return self.home_bytes() if self.there is None else self.there

    def home_bytes(self) -> torch.Tensor:
        """The bytes in RAM for their form; call ``join`` before reading them."""
        if self.passing is not None:
            return self.passing
        return self.memory.wide(self.unit) if self.is_wide else self.memory.own(self.unit)

    def view(self, place: Place) -> torch.Tensor:
        """The parameter's gradient in home memory; call ``join`` before reading it."""
        return place.gradient(self.home_bytes(), wide=self.is_wide)

    def held(self, indices: Iterable[int]) -> list[Place]:
        """Those of these places of which user code holds the gradient, or a view of it."""
        self.latest = None
        places = [self.unit.places[index] for index in indices if index in self.given]
        return [p for p in places if p.views and any(view._storm_kind == "grad" for view in p.views.values())]

    def let_go_of_views(self, indices: Iterable[int]) -> None:
        """Move views that user code holds to a copy: they keep their values when the buffer is overwritten."""
        for place in self.held(indices):
            self.join()
            with torch.no_grad():
                move_views(place, self.view(place).as_strided((place.count,), (1,)))
        for index in indices:
            self.given.pop(index, None)

    def awaits_more(self, token: Token) -> bool:
        """Whether the running backward will run more nodes of the unit than ``token``'s."""
        return any(other.is_to_come() for other in self.tokens if other is not token)

    def awaits_outer_pass(self, partial: Partial) -> bool:
        """Whether the outer pass around the one that brought ``partial`` may bring more; torch reports only the
        inner."""
        if not partial.nested:
            return False
        return any(t.passed == -1 and not (t.made_in_backward or t.idle) for t in self.tokens)

    def has_norm(self, index: int) -> bool:
        """Whether the norm of that gradient is known, or `measure` will compute it: user code has not written it."""
        return index in self.norms or index in self.unmeasured

    def measure(self) -> None:
        """Compute the norms that are not known, from home memory; blocks."""
        if not self.unmeasured:
            return
        self.join()
        found = {}
        for index in self.unmeasured:
            found[index] = norms_of([self.view(self.unit.places[index])])[0].to(self.lanes.device)
        self.norms, self.unmeasured = {**self.norms, **found}, set()

    def forget_norm(self, index: int) -> None:
        """User code writes that gradient, or may write it without our notice."""
        self.norms.pop(index, None)
        self.unmeasured.discard(index)

    def forget_norms(self) -> None:
        """The gradients are gone."""
        self.norms.clear()
        self.unmeasured.clear()

    def bring(self, *, passing: bool = False) -> None:
        """Store gradients that are on the device to home memory; ``passing``: to the ring, because an update follows at
        once."""
        store = self.lanes.store
        assert self.there is not None
        assert self.ready is not None
        if passing:
            target = self.memory.lend(self.unit, self.gate, store)
        else:
            target = self.home_bytes()
            self.gate.hold(store)  # the worker may still read the gradients of the step before
        store.wait(self.ready)
        store.copy(target, self.there, Tag.GRADIENTS, self.unit.index)
        self.arrivals += 1
        store.write_flag(self.arrived, self.arrivals)
        self.stored, self.there, self.passing = store.record(), None, target if passing else None

    def use_up(self) -> None:
        """Note that an update in backward has taken the gradients; it may still read them, until ``gate``."""
        self.consumed_places |= self.present
        self.present.clear()
        self.given.clear()
        self.forget_norms()
        self.passing = None

    def leave_ring(self) -> None:
        """Bring gradients that an update has failed to take to the unit's own home. They are lost if RAM has no room
        for that, or they never arrived."""
        passing, self.passing = self.passing, None
        if passing is None:
            return
        kept = self.present, self.norms, self.unmeasured
        self.present, self.norms, self.unmeasured = set(), {}, set()
        with contextlib.suppress(StormError):
            self.join()
            self.gate.join()  # an earlier update may still read that home
            self.memory.own(self.unit).copy_(passing)
            self.present, self.norms, self.unmeasured = kept

    def join(self) -> None:
        """Block until the gradients are at home."""
        if self.state is GradState.ON_DEVICE:
            self.bring()
        if self.stored is not None:
            self.stored.synchronize()
            self.stored = None


def norms_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Norms as torch's clipping takes them, but at least in fp32."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        return [norms_of([tensor])[0] for tensor in tensors]
    return list(torch._foreach_norm(tensors, 2.0, dtype=torch.float32 if dtypes.pop().itemsize < 4 else None))
