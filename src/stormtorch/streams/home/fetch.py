"""The node of autograd's graph through which a unit's weights enter it and its gradients leave it.

Forward hands out the unit's twins. Backward receives the gradients of all of them at once, when the last use has
contributed: autograd's engine decides when a unit is complete, also where parameters are frozen, unused, or used twice.

The node's inputs are the home parameters, so that autograd knows them as the leaves of the graph. The node returns no
gradient for them, because theirs go to the home gradients. For a parameter with user hooks it returns one, on the CPU,
and torch handles it as usual. Such a parameter has a node of its own: torch calls the hooks of all inputs of a node
that runs, also of those without a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...core.errors import StormError
from ..bridge.torch_private import current_pass, in_backward, will_accumulate, will_run
from ..units.unit import Unit
from .torch_grad import has_hooks

Collect = Callable[["Token", Sequence["torch.Tensor | None"], list[bool]], "list[torch.Tensor | None]"]


class Token:
    """Lives as long as its node of the graph. ``passed``: the backward pass that ran it last.

    ``idle``: made where no graph was recorded; a gradient comes only if a forward records one inside."""

    __slots__ = ("__weakref__", "idle", "made_in_backward", "node", "passed", "places", "unit")

    def __init__(self, unit: Unit, places: list[int], *, idle: bool) -> None:
        self.unit, self.places = unit, places  # places: indices into the unit's, one for each input
        self.idle = idle
        self.passed = -1
        self.made_in_backward = in_backward()  # by checkpointing, which runs forward again in backward
        self.node: Callable[[], Any] = lambda: None  # a weak reference

    def is_to_come(self) -> bool:
        """Whether the running backward pass will still run this node."""
        node = self.node()
        return self.passed != current_pass() and node is not None and will_run(node)


class Fetch(torch.autograd.Function):
    """``apply(token, collect, views, *parameters)`` gives twins over ``views``; their gradients go to ``collect``."""

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
        return tuple(view.data for view in views)  # .data: for autograd, not views of one another

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        leaves = [node for node, _ in ctx.next_functions[-len(grads) :]]
        wanted = [node is not None and will_accumulate(node) for node in leaves]
        for index, leaf, grad in zip(ctx.token.places, leaves, grads, strict=True):
            if grad is None and leaf is not None and len(leaves) > 1 and has_hooks(ctx.token.unit.places[index]):
                raise _late_hook(ctx.token.unit.places[index].name)
        if None in wanted:  # torch.autograd.grad: the gradients go to the caller
            return (None, None, None, *(None if grad is None else grad.to("cpu") for grad in grads))
        return (None, None, None, *ctx.collect(ctx.token, grads, wanted))


def _late_hook(name: str) -> StormError:
    return StormError(
        f"A hook was put on {name!r} between forward and backward, and this backward brings no gradient for it: torch "
        "would call the hook without one. Put hooks on parameters before the forward."
    )
