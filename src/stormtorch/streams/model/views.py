"""Twins: device views that stand in for parameters, in modules that compute and for user code that asks.

The twin of a frozen parameter is a view of the unit's device copy. The twin of a trained parameter comes from a node of
autograd's graph (fetch.py) and is kept until the pass ends, without the memory of device copies that were dropped. So a
unit that is used twice is one node of the graph, as a parameter is one leaf. Two passes in one backward make two nodes;
gradients/stream.py then adds up the two before anything else.

Without a graph, in `no_grad` and `inference_mode`, twins have such a node too: plain PyTorch shows ``requires_grad``
there unchanged, torch chooses kernels by it, and a forward may enable gradients inside. The device copy keeps these
twins.

calls.py installs twins in modules. User code that reaches a parameter without calling its module is lent a twin. An
in-place write to that one would be lost with the device copy, and is refused."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping

import torch

from ...core.errors import StormError
from ..bridge.lock import locked
from ..bridge.torch_private import (
    VersionProbe,
    in_backward,
    in_functorch,
    outside_functorch,
    without_torch_function,
)
from ..home.fetch import Fetch, Token
from ..home.torch_grad import has_hooks
from ..units.unit import Place, Unit
from ..weights.residency import Stay
from .schedule import Schedule


class Passes(threading.local):
    """How deep the calling thread is inside streamed modules, and the twins it was lent there."""

    depth = 0  # counted by calls.py
    handler = 0  # number of the signal handler that began the pass; a handler with another number interrupts it

    def __init__(self) -> None:
        self.lent: list[tuple[Place, VersionProbe]] = []  # twins that user code got without calling a module
        self.known: dict[int, weakref.ref[torch.Tensor]] = {}  # these by id; weak, because ids are reused


class Twins:
    """Makes twins, and finds those of the running pass."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._gradients, self.lock = schedule, schedule.gradients, schedule.lock
        self.passes = Passes()
        self._with_graph = schedule.residency.twins

    @outside_functorch
    def of_unit(self, unit: Unit, stay: Stay, places: list[Place], in_graph: bool) -> list[torch.Tensor]:
        """The twins of these ``places`` of the unit."""
        views, records = stay.views, torch.is_grad_enabled()
        if not views:
            with torch.inference_mode(False):  # no inference tensors: a later pass may train with these views
                views.update(unit.views(stay.base))
        known: dict[int, torch.Tensor] = {}
        if not in_graph:
            known = self._with_graph.find(unit.index, views) if records else stay.idle
        with without_torch_function():
            leaves = {place.index for place in places if place.parameter.requires_grad}
            fresh: list[Place] = []
            if not leaves <= known.keys():  # user code may freeze and thaw within a pass
                candidates = places if in_graph else unit.places
                fresh = [p for p in candidates if p.parameter.requires_grad and p.index not in known]
        if fresh:
            known = {**known, **self._fetch(unit, fresh, views, idle=not records)}
            if not in_graph and not records:
                stay.idle = known
            elif not in_graph and self.passes.depth:
                self._with_graph.add(unit.index, known)
        return [(known if place.index in leaves else views)[place.index] for place in places]

    def _fetch(
        self, unit: Unit, leaves: list[Place], views: Mapping[int, torch.Tensor], *, idle: bool
    ) -> dict[int, torch.Tensor]:
        """Make twins of ``leaves`` over ``views``, from one graph node; those with hooks have nodes of their own."""
        hooked = [place for place in leaves if has_hooks(place)]
        twins: dict[int, torch.Tensor] = {}
        for group in filter(None, [[place for place in leaves if place not in hooked], *([p] for p in hooked)]):
            token = Token(unit, [place.index for place in group], idle=idle)
            self._gradients.homes[unit.index].tokens.add(token)
            with torch.inference_mode(False), torch.enable_grad():
                made = Fetch.apply(  # type: ignore[no-untyped-call]
                    token,
                    self._schedule.collect,
                    [views[place.index] for place in group],
                    *(place.parameter for place in group),
                )
            twins.update((place.index, twin) for place, twin in zip(group, made, strict=True))
        return twins

    @locked
    def of(self, place: Place) -> torch.Tensor:
        """One parameter's twin, lent to user code."""
        stay = self._schedule.use(place.unit)
        self._schedule.residency.lend(place.unit)
        return self.lend(place, self.of_unit(place.unit, stay, [place], in_backward())[0])

    def lend(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        """Lend ``tensor``, which lies in a twin's memory; in forward, note it to detect writes."""
        passes = self.passes
        if passes.depth == 0 or in_backward():
            return tensor
        known = passes.known.get(id(tensor))
        if known is not None and known() is tensor:
            return tensor
        if not torch.is_inference_mode_enabled() and not in_functorch():
            passes.lent.append((place, VersionProbe(tensor)))
            passes.known[id(tensor)] = weakref.ref(tensor)
        return tensor

    def refuse_writes(self) -> None:
        """Raise if a lent twin was written. Writes to a parameter go home; those to a part of it, taken in forward, do
        not."""
        for place, probe in self.passes.lent:
            if probe.changed:
                raise StormError(
                    f"A forward has changed a view of the parameter {place.name!r}, or of one that is streamed with "
                    "it, in place, and the change would be lost. Write to the parameter itself (p.copy_(x), p[0] = x), "
                    "or pass its module's name to storm.stream: leave=[...]."
                )

    def end_pass(self) -> None:
        """Forget the twins of this pass."""
        self._with_graph.clear()
        self.passes.lent.clear()
        self.passes.known.clear()
