"""The attributes of a block's modules, as a forward found them.

A block that counts its calls, keeps a memory from call to call or leaves an auxiliary loss behind changes attributes of
its modules. Running it again in backward is right only if it finds the attributes of the first run and leaves no
changes. So a copy of each module's ``__dict__`` is taken before the block runs, and is put back during the second run.
Most modules never change theirs: for these the last copy is compared, which takes about a microsecond a module.

The copy is shallow. The contents of lists, dicts, tensors and random generators are compared instead; a block that
changes these may not run again."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

# Hooks are checked elsewhere; our own wrapper of the call comes and goes.
_OF_TORCH = (frozenset(vars(nn.Module())) - {"training"}) | {"_call_impl", "_compiled_call_impl"}
_CONTAINERS = (list, dict, set, deque)


class Look:
    """A module's attributes at one moment, without torch's own. Holds no graph: a tensor that has one is referred to
    weakly.

    ``everything`` is the whole ``__dict__``, if it has nothing whose contents may change: comparing with it tells
    fastest that nothing has."""

    __slots__ = ("everything", "found", "inside", "module", "versions")

    def __init__(self, module: nn.Module) -> None:
        self.module, self.found = module, _own(module)
        self.inside: list[tuple[Any, Any]] = []  # containers and generators, with their contents
        self.versions: list[tuple[weakref.ref[torch.Tensor], int]] = []
        sorts = {name: sort for name, value in self.found.items() if (sort := _sort_of(type(value)))}
        if module._buffers:
            self.inside.append((module._buffers, module._buffers.copy()))
        self.everything = None if sorts or module._buffers else module.__dict__.copy()
        for name, sort in sorts.items():
            value = self.found[name]
            match sort:
                case "tensor":
                    self._see(name, value)
                case "container":
                    self.inside.append((value, value.copy()))
                case "generator":
                    self.inside.append((value, value.get_state()))

    def _see(self, name: str, value: torch.Tensor) -> None:
        if name in self.module._parameters:
            del self.found[name]  # the device view of a streamed parameter, which calls.py installs and removes
            return
        if not value.is_inference():
            self.versions.append((weakref.ref(value), value._version))
        if value.grad_fn is not None:
            # A tensor that the block computed with is kept alive by its graph; any other need not come back.
            self.found[name] = weakref.ref(value)

    def is_there(self) -> bool:
        """Whether the module surely has these attributes now. False where it takes longer to find out."""
        before, now = self.everything, self.module.__dict__
        return (
            before is not None
            and len(before) == len(now)
            and all(map(operator.is_, before, now))
            and all(map(operator.is_, before.values(), now.values()))
        )


class Looks:
    """Looks at a block's modules, and remembers the last look at each one. Not at one that was found changed twice in a
    row: that would keep its old attributes alive for nothing."""

    __slots__ = ("_changed", "_last", "_modules")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules, self._changed = modules, [0] * len(modules)  # how often, since it was found the same
        self._last: list[Look | None] = [None] * len(modules)

    def now(self) -> list[Look]:
        looks = []
        for number, last in enumerate(self._last):
            if last is not None and last.is_there():
                self._changed[number] = 0
                looks.append(last)
                continue
            look = Look(self._modules[number])
            self._changed[number] += 1
            remembers = look.everything is not None and self._changed[number] <= 2
            self._last[number] = look if remembers else None
            looks.append(look)
        return looks


class Attributes:
    """The attributes at construction."""

    __slots__ = ("_before",)

    def __init__(self, looks: Looks) -> None:
        self._before = looks.now()

    def same_inside(self) -> bool:
        """Whether lists, dicts, tensors and generators have the same contents as before."""
        looks = [look for look in self._before if look.everything is None]
        versions = [entry for look in looks for entry in look.versions]
        return all(all(map(_is_same, look.inside)) for look in looks) and not any(
            (tensor := reference()) is not None and tensor._version != version for reference, version in versions
        )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Set the attributes of the first run; afterwards restore the present ones, whatever the run has set."""
        now = [look.found if look.is_there() else _own(look.module) for look in self._before]
        for look, own in zip(self._before, now, strict=True):
            if own is not look.found:
                _put(look.module, look.found, own)
        try:
            yield
        finally:
            for look, own in zip(self._before, now, strict=True):
                if own is not look.found or not look.is_there():
                    _put(look.module, own, _own(look.module))


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
