"""The node of autograd's graph through which a unit's weights enter it and its gradients leave it.

Forward hands out the unit's twins; backward receives the gradients of all of them at once, when the last use has
contributed: the engine itself says when a unit is complete, also where parameters are frozen, unused, or used twice.

The node's inputs are the home parameters, so that autograd knows them as the leaves of the graph. It gets no gradient
back for them, because theirs go to the home grads; where a user has put hooks on a parameter it does, on the CPU, and
everything that torch does with a gradient happens as ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .torch_private import current_pass, holders, in_backward, will_accumulate, will_run
from .unit import Unit

Collect = Callable[["Token", Sequence["torch.Tensor | None"], list[bool]], "list[torch.Tensor | None]"]


class Token:
    """Lives as long as its node of the graph. ``passed`` is the backward pass that ran it last."""

    __slots__ = ("__weakref__", "made_in_backward", "node", "passed", "places", "unit")

    def __init__(self, unit: Unit, places: list[int]) -> None:
        self.unit, self.places = unit, places  # places: indices into the unit's, one for each input
        self.passed = -1
        self.made_in_backward = in_backward()  # by checkpointing, which runs forward again there
        self.node: Callable[[], Any] = lambda: None  # a weak reference

    def is_to_come(self) -> bool:
        """Whether the running backward pass will run this node and has not yet."""
        node = self.node()
        return self.passed != current_pass() and node is not None and will_run(node)


class Fetch(torch.autograd.Function):
    """``apply(token, collect, views, *parameters)`` gives twins over ``views``, with gradients led to ``collect``."""

    @staticmethod
    def forward(
        ctx: Any,
        token: Token,
        collect: Collect,
        views: Sequence[torch.Tensor],
        *parameters: torch.Tensor,  # noqa: ARG004
    ) -> tuple[torch.Tensor, ...]:
        ctx.token, ctx.collect = token, collect
        token.node = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        return tuple(view.data for view in views)  # .data: not views of one another, to autograd

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        leaves = [node for node, _ in ctx.next_functions[-len(grads) :]]
        wanted = [node is not None and will_accumulate(node) for node in leaves]
        if None in wanted:  # torch.autograd.grad: the gradients are the caller's
            return (None, None, None, *(None if grad is None else grad.to("cpu") for grad in grads))
        return (None, None, None, *ctx.collect(ctx.token, grads, wanted))


class Twins:
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
