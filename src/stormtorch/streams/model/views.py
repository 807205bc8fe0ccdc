"""Twins, which stand in for parameters on the device: made for modules that compute, lent to user code that asks.

A frozen parameter's twin is a view of the unit's stay. The others come from a node of autograd's graph (fetch.py), and
are kept until the pass ends, without the memory of stays that ended before, so that a unit that is used twice is one
node of the graph, as a parameter is. Where it becomes two, by two passes in one backward, gradients/stream.py adds them
up before anything else.

Without a graph, in `no_grad` and `inference_mode`, twins have such a node too: plain PyTorch shows ``requires_grad``
there as ever, torch chooses kernels by it, and a forward may enable gradients inside. The stay keeps these twins.

calls.py puts them into modules. Whoever reaches a parameter without calling its module is lent one, and what is written
to that in place would be lost with the stay: it is refused."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping

import torch

from ...core.errors import StormError
from ...memory.pools.device import bytes_for_graph
from ..bridge.lock import locked
from ..bridge.torch_private import (
    VersionProbe,
    holders,
    in_backward,
    in_functorch,
    outside_functorch,
    without_torch_function,
)
from ..gradients.stream import GradientStream
from ..home.fetch import Fetch, Token
from ..units.unit import Place, Unit
from ..weights.stream import ParameterStream, Stay


class Passes(threading.local):
    """How deep the calling thread is inside streamed modules, and what it was lent there."""

    depth = 0  # counted by calls.py
    handler = 0  # the signal handler that has begun the pass, if one has: another one interrupts it

    def __init__(self) -> None:
        self.lent: list[tuple[Place, VersionProbe]] = []  # twins that user code got without calling a module
        self.known: dict[int, weakref.ref[torch.Tensor]] = {}  # those, by id, which another may have after them


class Twins:
    """Makes twins, and knows those of the pass that runs."""

    def __init__(self, parameters: ParameterStream, gradients: GradientStream, device: torch.device) -> None:
        self._parameters, self._gradients = parameters, gradients
        self.lock = parameters.lock
        self.passes = Passes()
        self._with_graph = _GraphTwins(bytes_for_graph(0, device))
        parameters.on_drop = self._let_go

    @outside_functorch
    def of_unit(self, unit: Unit, stay: Stay, in_graph: bool) -> dict[int, torch.Tensor]:
        """The tensors that stand in for the unit's parameters, by index."""
        views = stay.views
        if not views:
            with torch.inference_mode(False):  # views for good: a later pass may train with them
                views.update({place.index: place.in_image(stay.base) for place in unit.places})
        with without_torch_function():
            leaves = [place for place in unit.places if place.parameter.requires_grad]
        if not torch.is_grad_enabled():
            return self._without_graph(unit, stay, leaves, keep=not in_graph)
        known = self._with_graph.find(unit.index, views) if not in_graph else None
        if known is not None:  # users freeze and thaw within a pass, too
            views = {**views, **{place.index: known[place.index] for place in leaves if place.index in known}}
            leaves = [place for place in leaves if place.index not in known]
        if not leaves:
            return views
        twins = self._fetch(unit, leaves, views, idle=False)
        if not in_graph and self.passes.depth:
            self._with_graph.add(unit.index, {**(known or {}), **twins})
        return {**views, **twins}

    def _without_graph(self, unit: Unit, stay: Stay, leaves: list[Place], *, keep: bool) -> dict[int, torch.Tensor]:
        """The same where no graph is recorded; with ``keep`` the stay has them for its next use."""
        if not leaves:
            return stay.views
        if stay.idle is not None and stay.idle[0] == leaves:  # else user code has frozen or thawed some
            return stay.idle[1]
        with torch.inference_mode(False), torch.enable_grad():
            twins = {**stay.views, **self._fetch(unit, leaves, stay.views, idle=True)}
        if keep:
            stay.idle = (leaves, twins)
        return twins

    def _fetch(
        self, unit: Unit, leaves: list[Place], views: Mapping[int, torch.Tensor], *, idle: bool
    ) -> dict[int, torch.Tensor]:
        """Twins of ``leaves`` over ``views``, from a node of their own."""
        token = Token(unit, [place.index for place in leaves], idle=idle)
        self._gradients.homes[unit.index].expect(token)
        made = Fetch.apply(  # type: ignore[no-untyped-call]
            token,
            self._gradients.collect,
            [views[place.index] for place in leaves],
            *(place.parameter for place in leaves),
        )
        return {place.index: twin for place, twin in zip(leaves, made, strict=True)}

    @locked
    def of(self, place: Place) -> torch.Tensor:
        """One parameter's, lent."""
        stay = self._parameters.use(place.unit)
        return self.lend(place, self.of_unit(place.unit, stay, in_backward())[place.index])

    def lend(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, over the memory of a twin; in forward, whether it is written is noted."""
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
        """Writes to a parameter are seen, and go home; those to a part of it, taken in forward, do not."""
        for place, probe in self.passes.lent:
            if probe.changed:
                raise StormError(
                    f"A forward has changed a view of the parameter {place.name!r}, or of one that is streamed with "
                    "it, in place, and the change would be lost. Write to the parameter itself (p.copy_(x), p[0] = x), "
                    "or give the name of its module to storm.stream as leave=[...]."
                )

    def end_pass(self) -> None:
        """Forget what this pass was given."""
        self._with_graph.clear()
        self.passes.lent.clear()
        self.passes.known.clear()

    def _let_go(self, unit: Unit) -> None:
        """The unit's stay ends: we must not keep its bytes, but the node, for another use in this pass."""
        self._with_graph.let_go(unit.index)


class _GraphTwins:
    """The twins that have a graph, of the pass that runs: one node for each unit, as a parameter is one leaf.

    The engine adds up what comes to a node use by use, from the last to the first. Were there two nodes of a unit,
    because it left the device between two uses, each would add up its own, and the rounding would depend on the budget.
    So twins outlive the stay that they show: they let go of its memory, and are pointed at the next one. Only those
    that somebody else holds too, user code or autograd, keep their memory until nobody does.
    """

    def __init__(self, nothing: torch.Tensor) -> None:
        """``nothing``: no bytes, on the device. Made beforehand: who counts a block's operations would count this."""
        self._nothing = nothing
        self._known: dict[int, dict[int, torch.Tensor]] = {}  # unit -> place -> twin
        self._away: set[int] = set()  # units whose twins show no stay, or one that was dropped
        self._held: list[tuple[int, int]] = []  # unit and place of those that still do

    def clear(self) -> None:
        """The pass has ended."""
        self._known.clear()
        self._away.clear()
        self._held.clear()

    def add(self, unit: int, twins: dict[int, torch.Tensor]) -> None:
        self._known[unit] = twins

    def find(self, unit: int, views: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor] | None:
        """The unit's twins, over ``views``; None if it has none yet."""
        twins = self._known.get(unit)
        if twins is not None and unit in self._away:
            self._away.discard(unit)
            self._held = [held for held in self._held if held[0] != unit]
            for place, twin in twins.items():
                twin.data = views[place]
        return twins

    def let_go(self, unit: int) -> None:
        """The unit's stay is being dropped: nothing here may keep its bytes."""
        twins = self._known.get(unit)
        if twins is not None and unit not in self._away:
            self._away.add(unit)
            self._held += [(unit, place) for place in twins]
        self._held = [(number, place) for number, place in self._held if not self._emptied(self._known[number], place)]

    def _emptied(self, twins: dict[int, torch.Tensor], place: int) -> bool:
        if holders(twins, place) != _ALONE:
            return False
        with torch.inference_mode(False):
            twins[place].data = self._nothing.view(twins[place].dtype)
        return True


_ALONE = holders({0: torch.empty(0)}, 0)
