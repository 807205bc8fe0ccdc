"""Facts about a block and its arguments that decide whether it may run a second time."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...bridge.torch_private import has_global_hooks, has_user_modes, without_torch_function
from .layout import Layout

_is_trained = operator.attrgetter("requires_grad")


def _shape_of(block: nn.Module) -> Any:
    """A key: blocks of one shape do the same work in the same way."""
    with without_torch_function():
        tensors = (*block.named_parameters(), *block.named_buffers())
        modules = tuple((name, type(module)) for name, module in block.named_modules())
        return modules, tuple((name, is_lazy(tensor) or tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)


class Anatomy:
    """A block's modules and what is registered in them, found once: walking through them at each call takes longer than
    many an operation."""

    def __init__(self, block: nn.Module, numbers: dict[Any, int]) -> None:
        """``numbers``: of shapes. A number is hashed and compared faster than a shape."""
        self.shape = numbers.setdefault(_shape_of(block), len(numbers))
        self.modules = list(block.modules())
        self._scripted = any(isinstance(module, torch.jit.ScriptModule) for module in self.modules)
        # TorchScript keeps parameters elsewhere, and is not run again.
        self.layout = Layout([] if self._scripted else self.modules)
        entries = self.layout.entries()
        self._children = self.layout.registered("_modules", entries)
        self._own = set(map(id, self.layout.registered("_parameters", entries)))
        # Whether it has its own parameters, not those of ``functional_call``, which are gone in backward.
        self.has_its_own = True

    def look(self) -> list[Any] | None:
        """What the tables of ``layout`` contain, which is brought up to date; None if the block has other modules than
        it had."""
        if self.layout.is_there():
            return self.layout.entries()
        layout = Layout(self.layout.modules, self.layout)
        entries = layout.entries()
        children = layout.registered("_modules", entries)
        if len(children) != len(self._children) or not all(map(operator.is_, children, self._children)):
            return None
        self.layout = layout
        self.has_its_own = self._own <= set(map(id, layout.registered("_parameters", entries)))
        return entries

    def manner(self, entries: Sequence[Any]) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """The modes that may change between calls: which modules are training, which parameters are trained."""
        return tuple([module.training for module in self.modules]), are_trained(
            self.layout.registered("_parameters", entries)
        )

    def is_listened_to(self) -> bool:
        """Whether user code would notice a second run: hooks, modes around the forward, and TorchScript, which does not
        pass on the exception that ends a second run."""
        return self._scripted or has_user_modes() or has_global_hooks() or self.is_hooked()

    def is_hooked(self) -> bool:
        """Whether user code has registered a hook on one of its modules."""
        return any(module._forward_hooks or module._forward_pre_hooks for module in self.modules)


def are_trained(weights: Sequence[Any]) -> tuple[bool, ...]:
    """Which of them require a gradient."""
    with without_torch_function():
        return tuple(map(_is_trained, weights))


_VALUES = (torch.Tensor, int, float, bool, str, bytes, complex, torch.dtype, torch.device, type(None))


def object_in(given: Any) -> Any:
    """An argument that a second run would change again, e.g. a cache of keys or a list. None if there is none."""
    return next((leaf for leaf in leaves_of(given) if not isinstance(leaf, _VALUES)), None)


def leaves_of(value: Any) -> list[Any]:
    """The items of nested tuples. Other objects count as one item: the block may change their content."""
    if type(value) is tuple:
        return [leaf for item in value for leaf in leaves_of(item)]
    return [value]


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def replaced(value: Any, kind: type, change: Callable[[Any], Any], made: dict[int, Any] | None = None) -> Any:
    """``value`` with ``change`` of its items of that type, see ``leaves_of``; of one that is there twice only once."""
    made = {} if made is None else made
    if type(value) is tuple:
        return tuple([replaced(item, kind, change, made) for item in value])
    if type(value) is not kind:
        return value
    if id(value) not in made:
        made[id(value)] = change(value)
    return made[id(value)]
