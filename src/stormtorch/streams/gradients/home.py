"""One unit's gradients: where they lie, which are present, which graph nodes may add to them, which views exist."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ...memory.lanes.flags import Flag
from ...memory.lanes.lane import Event
from ..home.fetch import Token
from ..home.parameter import HomeView
from ..units.unit import Place, Unit

Family = weakref.WeakValueDictionary[int, HomeView]  # the views of one gradient, by id


@dataclass(eq=False)
class Partial:
    """Gradients that one backward pass has brought so far."""

    nested: bool  # reentrant checkpointing runs a pass inside of another
    grads: dict[int, torch.Tensor] = field(default_factory=dict)  # by place


@dataclass(eq=False)
class GradHome:
    """State of one unit's gradients."""

    unit: Unit
    arrived: Flag
    own: torch.Tensor | None = None
    wide: torch.Tensor | None = None
    is_wide: bool = False
    present: set[int] = field(default_factory=set)  # indices of places
    consumed: bool = False  # updated from in backward: user code must not read them any more
    consumed_places: set[int] = field(default_factory=set)
    views: dict[int, Family] = field(default_factory=dict)  # that user code may hold, by place
    shared: set[int] = field(default_factory=set)  # places of which torch has delivered a part since they were dropped
    norms: dict[int, torch.Tensor] = field(default_factory=dict)
    stored: Event | None = None
    there: torch.Tensor | None = None  # the gradients on the device; home memory does not have them yet
    ready: Event | None = None  # when compute has made those
    bring: Callable[[GradHome], None] = lambda _home: None  # sends them home
    arrivals: int = 0  # the value of ``arrived`` that says the last store has ended
    partial: dict[int, Partial] = field(default_factory=dict)  # by pass; waits for more uses of the unit
    tokens: list[weakref.ref[Token]] = field(default_factory=list)  # of the nodes that may contribute

    def view(self, place: Place) -> torch.Tensor:
        """The parameter's gradient in home memory; call ``join`` before reading it."""
        if self.is_wide:
            assert self.wide is not None
            return place.view(self.wide, place.wide_at, place.wide_dtype)
        assert self.own is not None
        return place.view(self.own, place.grad_at, place.dtype)

    def watch(self, place: Place, view: HomeView) -> HomeView:
        """Note a view that user code gets. Views made from it register themselves."""
        family = self.views.get(place.index)
        if family is None:
            family = self.views[place.index] = Family()
        view._storm_family = family
        family[id(view)] = view
        return view

    def is_held(self) -> bool:
        """Whether user code holds a gradient, or a view of one."""
        return any(self.views.values())

    def expect(self, token: Token) -> None:
        """Note a node of the graph that may contribute."""
        if len(self.tokens) > 8:
            self.live_tokens()  # forgets the dead
        self.tokens.append(weakref.ref(token))

    def live_tokens(self) -> list[Token]:
        live = [token for reference in self.tokens if (token := reference()) is not None]
        self.tokens = [weakref.ref(token) for token in live]
        return live

    def awaits_outer_pass(self, partial: Partial) -> bool:
        """Whether the outer pass around the one that brought ``partial`` may bring more; torch reports only the
        inner."""
        if not partial.nested:
            return False
        return any(t.passed == -1 and not (t.made_in_backward or t.idle) for t in self.live_tokens())

    def join(self) -> None:
        """Block until the gradients are at home."""
        if self.there is not None:
            self.bring(self)
        if self.stored is not None:
            self.stored.synchronize()
            self.stored = None
