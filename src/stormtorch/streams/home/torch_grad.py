"""A parameter's own ``grad`` slot in torch, behind the gradient that user code sees.

Torch itself delivers to this slot the gradients that STORM does not collect: sparse ones, those of parameters that have
hooks or that no optimizer trains, and those with a graph of their own."""

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
    """Whether the slot has a sparse gradient, which remains there."""
    real = real_grad(place)
    return real is not None and real.layout is not torch.strided


def reception(place: Place) -> tuple[torch.Tensor | None, bool, bool]:
    """The gradient in the slot, whether hooks want to see a gradient on its way to it, and whether none is wanted now.

    The last may have changed since the graph was made: torch asks in backward, too. One call, because every parameter's
    backward asks for all three."""
    with without_torch_function():
        parameter: Any = place.parameter
        hooked = bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
        return parameter.grad, hooked, not parameter.requires_grad


def excuse_hooks(place: Place) -> None:
    """Silence the parameter's hooks for this backward: its unit's node brought no gradient, and torch calls them
    anyway.

    They run if a gradient comes another way. A hook decides that when it is first called, wherever the call comes
    from."""
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
    """State of the parameter's own slot before torch may accumulate into it."""

    __slots__ = ("_grad", "_untouched", "_version")

    def __init__(self, grad: torch.Tensor | None) -> None:
        self._grad, self._version = grad, -1 if grad is None else grad._version
        self._untouched: bool | None = None

    def is_untouched(self, grad: torch.Tensor | None) -> bool:
        """Whether it was unchanged when the first hook asked: that hook may have changed it since."""
        if self._untouched is None:
            self._untouched = grad is self._grad and (grad is None or grad._version == self._version)
            self._grad = None
        return self._untouched


class _Excused:
    """A user's hook of a parameter. The first call after ``before`` was set is skipped if there is no gradient."""

    __slots__ = ("__wrapped__", "before")

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        self.__wrapped__ = hook
        self.before: _Slot | None = None

    def __call__(self, given: Any) -> Any:
        before, self.before = self.before, None
        if before is not None:
            with without_torch_function():  # ``given`` is a gradient or, after accumulation, the parameter
                if given is None or (isinstance(given, torch.nn.Parameter) and before.is_untouched(given.grad)):
                    return None
        return self.__wrapped__(given)
