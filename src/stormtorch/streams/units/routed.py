"""Fused experts: a module whose parameters have a row for each expert, of which one call needs a few.

transformers keeps the experts of a layer in one parameter, and calls the module with the experts that each token was
routed to. Every implementation that it may choose (a loop, a grouped or a batched matrix product) reads the rows of
those experts only: that is the contract of ``use_experts_implementation``. Modules of other kinds, and code of users in
their place, may read others and get all. So a call for few tokens needs few rows on the device."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..bridge.torch_private import has_global_hooks
from .unit import Place, is_dense

_INDICES = ("top_k_index", "router_indices")  # what these modules call the argument
_MODELS = "transformers.models."
_MARKS = ("is_concatenated", "num_experts")  # set by use_experts_implementation, and by modules


@dataclass(frozen=True)
class Routed:
    """``experts``: how many there are; ``name``, ``position``: the argument that names those of a call."""

    experts: int
    name: str
    position: int

    def rows(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int] | None:
        """The experts that a call of ``module`` with these arguments needs. None: so many that all of them should come,
        or user code may look at others, or may name others. Waits for the device."""
        if has_global_hooks() or not _is_as_made(module):
            return None
        given = kwargs.get(self.name, args[self.position] if self.position < len(args) else None)
        if type(given) is not torch.Tensor or given.is_meta or given.is_floating_point():
            return None
        if not 0 < given.numel() <= self.experts:  # of so many, evenly routed, a third are needed twice
            return None
        if given.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        found = frozenset(given.flatten().tolist())
        # One past the last stands for a token that no expert takes.
        return None if min(found) < 0 or max(found) > self.experts else found - {self.experts}

    def has_row(self, place: Place) -> bool:
        """Whether the parameter has a row for each expert."""
        return len(place.shape) > 1 and place.shape[0] == self.experts and place.stride[0] * self.experts == place.count

    def row_bytes(self, place: Place) -> int:
        """The bytes of one expert in it."""
        return place.count // self.experts * place.dtype.itemsize


def _is_as_made(module: Any) -> bool:
    """Whether a call of ``module`` runs code of transformers alone. That can change between two calls."""
    if any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in module.modules()):
        return False
    theirs: Any = sys.modules.get("transformers.integrations.moe")
    kind: Any = type(module)
    eager = getattr(kind.forward, "__wrapped__", None)
    if theirs is None or kind.forward.__code__.co_filename != theirs.__file__ or eager is None:
        return False  # user code has replaced the forward that chooses an implementation
    if not (kind.__module__.startswith(_MODELS) and eager.__module__.startswith(_MODELS)):
        return False
    chosen = theirs.ALL_EXPERTS_FUNCTIONS.get(module.config._experts_implementation, eager)
    return str(chosen.__module__).startswith("transformers.")


def routed(module: nn.Module) -> Routed | None:
    """How calls of ``module`` name experts; None: it is no such module."""
    if not all(hasattr(module, mark) for mark in _MARKS):
        return None
    experts = module.num_experts
    if not isinstance(experts, int) or getattr(module, "_is_expert_parallel", False):
        return None
    parameters = list(module.parameters(recurse=False))
    if len(parameters) < sum(1 for _ in module.parameters()):
        return None  # some are those of modules inside, and have no rows
    if not any(p.dim() > 1 and p.shape[0] == experts and is_dense(p) for p in parameters):
        return None
    arguments = list(inspect.signature(type(module).forward).parameters)[1:]
    for position, name in enumerate(arguments):
        if name in _INDICES:
            return Routed(experts, name, position)
    return None
