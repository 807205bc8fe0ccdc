"""The slot for a gradient that torch itself gives to a parameter, behind what user code sees of it.

Torch delivers there what is not ours to collect: sparse gradients, those of parameters that have hooks or that no
optimizer trains, and those with a graph of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..bridge.torch_private import without_torch_function
from ..units.unit import Place


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


def reception(place: Place) -> tuple[torch.Tensor | None, bool, bool]:
    """What is in the slot, whether somebody wants to see a gradient on its way to it, and whether none is wanted now.

    That one may differ from what it was when the graph was made: torch asks in backward, too. One call, because every
    parameter's backward asks for all three."""
    with without_torch_function():
        parameter: Any = place.parameter
        hooked = bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
        return parameter.grad, hooked, not parameter.requires_grad


def excuse_hooks(place: Place) -> None:
    """Nothing came for the parameter from its unit's node, and torch calls hooks nevertheless: they stay silent now.

    Unless something comes to it by another way. A hook is told so when this happens first, wherever it comes from."""
    with without_torch_function():
        parameter: Any = place.parameter
        slot: _Slot | None = None
        both: list[Any] = [parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)]
        for hooks in both:
            for key, hook in list(hooks.items()) if hooks else ():
                slot = slot or _Slot(parameter.grad)
                if not isinstance(hook, _Excused):
                    hooks[key] = hook = _Excused(hook)  # noqa: PLW2901
                hook.before = slot


class _Slot:
    """The parameter's own slot before torch accumulates into it, perhaps."""

    __slots__ = ("_grad", "_untouched", "_version")

    def __init__(self, grad: torch.Tensor | None) -> None:
        self._grad, self._version = grad, -1 if grad is None else grad._version
        self._untouched: bool | None = None

    def is_untouched(self, grad: torch.Tensor | None) -> bool:
        """Whether it still was so when the first hook asked: that one may have changed it."""
        if self._untouched is None:
            self._untouched = grad is self._grad and (grad is None or grad._version == self._version)
            self._grad = None
        return self._untouched


class _Excused:
    """A user's hook of a parameter. Once after ``before`` was set it asks whether there is anything to call it for."""

    __slots__ = ("__wrapped__", "before")

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        self.__wrapped__ = hook
        self.before: _Slot | None = None

    def __call__(self, given: Any) -> Any:
        before, self.before = self.before, None
        if before is not None:
            with without_torch_function():  # a gradient, or, after it was accumulated, the parameter
                if given is None or (isinstance(given, torch.nn.Parameter) and before.is_untouched(given.grad)):
                    return None
        return self.__wrapped__(given)
