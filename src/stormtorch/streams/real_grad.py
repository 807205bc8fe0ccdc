"""The slot for a gradient that torch itself gives to a parameter, behind what user code sees of it.

Torch delivers there what is not ours to collect: sparse gradients, those of parameters that have hooks or that no
optimizer trains, and those with a graph of their own."""

from __future__ import annotations

import torch

from .torch_private import without_torch_function
from .unit import Place


def real_grad(place: Place) -> torch.Tensor | None:
    with without_torch_function():
        return place.parameter.grad


def set_real_grad(place: Place, value: torch.Tensor | None) -> None:
    with without_torch_function():
        place.parameter.grad = value


def has_sparse_grad(place: Place) -> bool:
    """Whether the gradient there is a sparse one; it stays there."""
    real = real_grad(place)
    return real is not None and real.layout is not torch.strided


def has_hooks(place: Place) -> bool:
    """Whether somebody wants to see the gradient on its way to the slot."""
    with without_torch_function():
        parameter = place.parameter
        return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
