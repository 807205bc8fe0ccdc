"""A parameter's own ``grad`` slot in torch, behind the gradient that user code sees.

Torch itself delivers to this slot the gradients that STORM does not collect: sparse ones, those of parameters that have
hooks or that no optimizer trains, and those with a graph of their own."""

from __future__ import annotations

from typing import Any

import torch

from ..bridge.torch_private import without_torch_function
from ..units.unit import Place

SLOT: Any = torch.Tensor.grad  # a streamed parameter's own ``grad`` is a property (parameter.py)


def real_grad(place: Place) -> torch.Tensor | None:
    with without_torch_function():
        return SLOT.__get__(place.parameter)  # type: ignore[no-any-return]


def set_real_grad(place: Place, value: torch.Tensor | None) -> None:
    with without_torch_function():
        SLOT.__set__(place.parameter, value)


def has_sparse_grad(place: Place) -> bool:
    """Whether the slot has a sparse gradient, which remains there."""
    real = real_grad(place)
    return real is not None and real.layout is not torch.strided


def has_hooks(place: Place) -> bool:
    """Whether user code wants to see gradients on their way to the slot."""
    with without_torch_function():
        return _is_hooked(place.parameter)


def _is_hooked(parameter: Any) -> bool:
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def reception(place: Place) -> tuple[torch.Tensor | None, bool, bool]:
    """The gradient in the slot, whether it `has_hooks`, and whether none is wanted now.

    The last may have changed since the graph was made: torch asks in backward, too. One call, because every
    parameter's backward asks for all three."""
    with without_torch_function():
        parameter = place.parameter
        return SLOT.__get__(parameter), _is_hooked(parameter), not parameter.requires_grad
