"""The attributes of a block's modules, as a forward found them.

A block that counts its calls, keeps a memory from call to call or leaves an auxiliary loss behind changes attributes of
its modules. Running it again in backward is right only if it finds the attributes of the first run and leaves no
changes. So a copy of each module's ``__dict__`` is taken before the block runs, which costs about a microsecond a
module, and is put back during the second run.

The copy is shallow. The contents of lists, dicts, tensors and random generators are compared instead; a block that
changes these may not run again."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

# Hooks are checked elsewhere; our own wrapper of the call comes and goes.
_OF_TORCH = (frozenset(vars(nn.Module())) - {"training"}) | {"_call_impl", "_compiled_call_impl"}
_CONTAINERS = (list, dict, set, deque)


class Attributes:
    """The attributes at construction. Holds no graph: a tensor that has one is referred to weakly."""

    __slots__ = ("_before", "_inside", "_versions")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._before: list[tuple[nn.Module, dict[str, Any]]] = []
        self._inside: list[tuple[Any, Any]] = []  # containers and generators, with their contents
        self._versions: list[tuple[weakref.ref[torch.Tensor], int]] = []
        for module in modules:
            found = _own(module)
            if module._buffers:
                self._inside.append((module._buffers, module._buffers.copy()))
            for name, value in list(found.items()):
                match _sort_of(type(value)):
                    case "tensor":
                        self._see(found, name, value, module)
                    case "container":
                        self._inside.append((value, value.copy()))
                    case "generator":
                        self._inside.append((value, value.get_state()))
            self._before.append((module, found))

    def _see(self, found: dict[str, Any], name: str, value: torch.Tensor, module: nn.Module) -> None:
        if name in module._parameters:
            del found[name]  # the device view of a streamed parameter, which calls.py installs and removes
            return
        if not value.is_inference():
            self._versions.append((weakref.ref(value), value._version))
        if value.grad_fn is not None:
            # A tensor that the block computed with is kept alive by its graph; any other need not come back.
            found[name] = weakref.ref(value)

    def same_inside(self) -> bool:
        """Whether lists, dicts, tensors and generators have the same contents as before."""
        return all(map(_is_same, self._inside)) and not any(
            (tensor := reference()) is not None and tensor._version != version for reference, version in self._versions
        )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Set the attributes of the first run; afterwards restore the present ones, whatever the run has set."""
        now = [(module, _own(module)) for module, _ in self._before]
        for (module, found), (_, own) in zip(self._before, now, strict=True):
            _put(module, found, own)
        try:
            yield
        finally:
            for module, found in now:
                _put(module, found, _own(module))


_sorts: dict[type, str] = {}


def _sort_of(kind: type) -> str:
    """How to compare a value of this type. By type: asking an object of transformers for its class takes
    microseconds."""
    if kind not in _sorts:
        known = (("tensor", torch.Tensor), ("container", _CONTAINERS), ("generator", torch.Generator))
        _sorts[kind] = next((sort for sort, kinds in known if issubclass(kind, kinds)), "")
    return _sorts[kind]


def _own(module: nn.Module) -> dict[str, Any]:
    """A module's attributes that are not torch's own."""
    there = module.__dict__
    return {name: there[name] for name in there.keys() - _OF_TORCH}


def _put(module: nn.Module, values: dict[str, Any], own: dict[str, Any]) -> None:
    """Give ``module``, whose attributes are ``own``, those of ``values``."""
    there, parameters = module.__dict__, module._parameters
    if own.keys() == values.keys() and all(own[name] is value for name, value in values.items()):
        return
    for name, value in values.items():
        if own.get(name) is value or name in parameters:
            continue
        tensor = value() if isinstance(value, weakref.ref) else value
        if tensor is not None or value is None:
            there[name] = tensor
    for name in own.keys() - values.keys() - parameters.keys():
        del there[name]


def _is_same(entry: tuple[Any, Any]) -> bool:
    value, before = entry
    if isinstance(value, torch.Generator):
        return torch.equal(value.get_state(), before)
    if len(value) != len(before):
        return False
    if isinstance(value, dict):
        return all(key in before and before[key] is item for key, item in value.items())
    if isinstance(value, set):
        return bool(value == before)
    return all(a is b for a, b in zip(value, before, strict=True))
