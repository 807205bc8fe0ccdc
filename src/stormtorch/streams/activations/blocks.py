"""What can be known of a block and of its arguments, to judge whether it may be run a second time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..bridge.torch_private import has_global_hooks, has_user_modes, without_torch_function


def shape_of(block: nn.Module) -> Any:
    """Blocks of one shape do the same work, in the same manner."""
    with without_torch_function():
        tensors = (*block.named_parameters(), *block.named_buffers())
        modules = tuple((name, type(module)) for name, module in block.named_modules())
        return modules, tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)


class Anatomy:
    """A block's modules, and where its parameters stand in them: found once, because walking through them at each call
    takes longer than many an operation."""

    __slots__ = ("_own", "_places", "_scripted", "modules")

    def __init__(self, block: nn.Module) -> None:
        self.modules = list(block.modules())
        self._scripted = any(isinstance(module, torch.jit.ScriptModule) for module in self.modules)
        looked_at = (
            [] if self._scripted else self.modules
        )  # TorchScript keeps parameters elsewhere, and is not run again
        found = {id(p): (m, name) for m in reversed(looked_at) for name, p in m._parameters.items() if p is not None}
        self._places = list(found.values())
        self._own = [id(parameter) for parameter in self.parameters()]

    def parameters(self) -> list[Any]:
        """What stands in their places now."""
        return [module._parameters.get(name) for module, name in self._places]

    def has_its_own(self) -> bool:
        """Whether its parameters are those that it had, and not ``functional_call``'s, which will be gone."""
        return [id(parameter) for parameter in self.parameters()] == self._own

    def manner(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """What may change from one call to the next: which modules are training, which parameters are trained."""
        with without_torch_function():
            trained = tuple(p is not None and p.requires_grad for p in self.parameters())
        return tuple(module.training for module in self.modules), trained

    def is_listened_to(self) -> bool:
        """Whether user code would notice a second run: hooks, modes around the forward, and TorchScript, through which
        the exception that ends a second run does not pass."""
        return (
            self._scripted
            or has_user_modes()
            or has_global_hooks()
            or any(module._forward_hooks or module._forward_pre_hooks for module in self.modules)
        )


_VALUES = (torch.Tensor, int, float, bool, str, bytes, complex, torch.dtype, torch.device, type(None))


def object_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An argument that is no value, and that a second run would change again: a cache of keys, a list. None: there is
    no such thing."""
    return next((leaf for leaf in leaves_of((*args, *kwargs.values())) if not isinstance(leaf, _VALUES)), None)


def leaves_of(value: Any) -> list[Any]:
    """What is in tuples. Not in other objects, which are handed on as they are: the block may change them."""
    if type(value) is tuple:
        return [leaf for item in value for leaf in leaves_of(item)]
    return [value]


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of((*args, *kwargs.values())) if isinstance(leaf, torch.Tensor)]


def filled(form: Any, leaves: Iterator[Any]) -> Any:
    """``form`` with other leaves."""
    if type(form) is tuple:
        return tuple(filled(item, leaves) for item in form)
    return next(leaves)
