"""Facts about a block and its arguments that decide whether it may run a second time."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...bridge.torch_private import has_global_hooks, has_user_modes, without_torch_function
from .attributes import Looks
from .contents import Tables

_is_trained = operator.attrgetter("requires_grad")
_RUNS = 8  # second runs of a block that show whether it draws random numbers


def shape_of(block: nn.Module) -> Any:
    """A key: blocks of one shape do the same work in the same way."""
    with without_torch_function():
        tensors = (*block.named_parameters(), *block.named_buffers())
        modules = tuple((name, type(module)) for name, module in block.named_modules())
        return modules, tuple((name, _shape(tensor), tensor.dtype) for name, tensor in tensors)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return () if is_lazy(tensor) else tuple(tensor.shape)


class Anatomy:
    """A block's modules and the places of its parameters in them, found once: walking through them at each call takes
    longer than many an operation."""

    __slots__ = (
        "_asked",
        "_children",
        "_has_own",
        "_own",
        "_places",
        "_scripted",
        "draws",
        "looks",
        "modules",
        "tables",
    )

    def __init__(self, block: nn.Module) -> None:
        self.modules = list(block.modules())
        self.looks, self._children = Looks(self.modules), self._children_now()
        self._scripted = any(isinstance(module, torch.jit.ScriptModule) for module in self.modules)
        # TorchScript keeps parameters elsewhere, and is not run again.
        looked_at = [] if self._scripted else self.modules
        found = {id(p): (m, name) for m in reversed(looked_at) for name, p in m._parameters.items() if p is not None}
        self._places = list(found.values())
        self._own, self._has_own = [id(parameter) for parameter in self.parameters()], True
        self.draws, self._asked = False, 0  # whether its second runs have drawn random numbers
        self.tables = Tables(looked_at)  # as `is_current` has found them

    def _children_now(self) -> list[nn.Module | None]:
        return [child for module in self.modules for child in module._modules.values()]

    def is_current(self) -> bool:
        """Whether the block still has the modules that it had. Looks at its parameters and buffers too."""
        if not self._scripted and self.tables.unchanged():
            return True
        now = self._children_now()
        if len(now) != len(self._children) or not all(map(operator.is_, now, self._children)):
            return False
        self._has_own = [id(parameter) for parameter in self.parameters()] == self._own
        self.tables = Tables([] if self._scripted else self.modules)
        return True

    def parameters(self) -> list[Any]:
        """The tensors that are in the parameters' places now."""
        return [module._parameters.get(name) for module, name in self._places]

    def has_its_own(self) -> bool:
        """Whether `is_current` has found the block's own parameters, not those of ``functional_call``, which are gone
        in backward."""
        return self._has_own

    def manner(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """The modes that may change between calls: which modules are training, which parameters are trained."""
        return tuple([module.training for module in self.modules]), self.trained()

    def trained(self) -> tuple[bool, ...]:
        """Which parameters are trained."""
        parameters = self.parameters()
        with without_torch_function():
            try:
                return tuple(map(_is_trained, parameters))
            except AttributeError:  # one was removed
                return tuple([p is not None and p.requires_grad for p in parameters])

    def may_draw(self) -> bool:
        """Whether a second run may draw random numbers: it has, or there were few so far."""
        self._asked += 1
        return self.draws or self._asked <= _RUNS

    def is_listened_to(self) -> bool:
        """Whether user code would notice a second run: hooks, modes around the forward, and TorchScript, which does not
        pass on the exception that ends a second run."""
        return self._scripted or has_user_modes() or has_global_hooks() or self.is_hooked()

    def is_hooked(self) -> bool:
        """Whether user code has registered a hook on one of its modules."""
        return any(module._forward_hooks or module._forward_pre_hooks for module in self.modules)


_VALUES = (torch.Tensor, int, float, bool, str, bytes, complex, torch.dtype, torch.device, type(None))


def object_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An argument that a second run would change again, e.g. a cache of keys or a list. None if there is none."""
    for leaf in leaves_of((*args, *kwargs.values())):
        if not isinstance(leaf, _VALUES):
            return leaf
    return None


def leaves_of(value: Any) -> list[Any]:
    """The items of nested tuples. Other objects count as one item: the block may change their content."""
    if type(value) is tuple:
        return [leaf for item in value for leaf in leaves_of(item)]
    return [value]


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of((*args, *kwargs.values())) if isinstance(leaf, torch.Tensor)]


def filled(form: Any, leaves: Iterator[Any]) -> Any:
    """``form`` with its items replaced by ``leaves``."""
    if type(form) is tuple:
        return tuple(filled(item, leaves) for item in form)
    return next(leaves)
