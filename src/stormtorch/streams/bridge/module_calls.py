"""Wrappers around the calls of modules, on the module instances.

A copy or pickle of a wrapped module gets the ordinary call. A wrapper refers to its owner weakly: neither a module nor
user code that has wrapped the wrapper keeps a session alive."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import nn

O = TypeVar("O")  # noqa: E741
_NAMES = ("_call_impl", "_compiled_call_impl")


class ModuleCall(Generic[O]):
    """Stands in for ``module._call_impl``; a child defines ``__call__``. ``original``: the call that it replaces."""

    def __init__(self, owner: O, module: nn.Module, original: Callable[..., Any]) -> None:
        self._owner, self._module = weakref.ref(owner), weakref.ref(module)
        self._original = original

    def belongs_to(self, owner: object) -> bool:
        return self._owner() is owner

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(nn.Module._call_impl, memo[id(self._module())])

    def __reduce__(self) -> Any:
        return getattr, (self._module(), "_call_impl")  # the class's method: the instance is being built


class WrappedCalls:
    """The wrappers of one owner."""

    def __init__(self, owner: object) -> None:
        self._owner = weakref.ref(owner)
        self._wrapped: list[tuple[nn.Module, str, Any]] = []

    def wrap(self, module: nn.Module, make: Callable[[Callable[..., Any]], ModuleCall[Any]]) -> None:
        """Put what ``make`` makes of the module's call in its place, around wrappers that are already there."""
        for name in _NAMES:
            original = getattr(module, name)
            if original is not None:
                self._wrapped.append((module, name, vars(module).get(name)))
                module.__dict__[name] = make(original)

    def unwrap(self) -> None:
        """Undo ``wrap``, the last first. Safe to call twice."""
        while self._wrapped:
            module, name, had = self._wrapped.pop()
            ours = module.__dict__.get(name)
            if not isinstance(ours, ModuleCall) or not ours.belongs_to(self._owner()):
                continue  # user code has wrapped ours, which passes calls through from now on
            if had is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = had
