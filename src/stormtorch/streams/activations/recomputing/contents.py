"""What a forward finds in a block, to be set again for its second run: attributes, parameters, buffers and children of
its modules (layout.py), and what those objects contain.

A block that changes the contents of lists, dicts, arrays or random generators, or which parameters, buffers and
children a module has, may not run again. If other code changes them before backward, they are restored for the second
run, and what that run changes is undone.

Tensors are too large to copy. One that is written to before backward is an error, as it is in plain PyTorch where
autograd has saved it. Small ones, such as counters and scales, are copied, and the second run computes with the copy.

Attributes of the block's modules and of other objects, such as a config or a counter of calls, may change in any run:
the second one finds those of the first, and leaves no changes."""

from __future__ import annotations

import itertools
import operator
import pickle
import random
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ....core.sizes import KiB
from ...bridge.torch_private import has_plain_storage, without_torch_function
from .layout import CONTAINERS, Layout, attributes_of, sort_of

_COPIED_BYTES = 64 * KiB  # tensors and arrays up to this size are copied
_ITEMS, _DEPTH = 256, 4  # of containers: those that are looked into


class _Graphless:
    """Stands for a tensor that has a graph, and does not keep that alive."""

    __slots__ = ("_data", "_reference")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference, self._data = weakref.ref(tensor), tensor.detach()

    def get(self) -> torch.Tensor:
        """The tensor; if it is gone, one with its values, of which operations save as much."""
        tensor = self._reference()
        return self._data.detach().requires_grad_() if tensor is None else tensor


class _Items(tuple[Any, ...]):
    """Stands for a tuple in which tensors were replaced."""


def _without_graph(value: Any) -> Any:
    """``value``, to be kept: a tensor that has a graph, also in tuples, is replaced."""
    if isinstance(value, torch.Tensor):
        return _Graphless(value) if value.grad_fn is not None else value
    if type(value) is tuple:
        items = _Items(map(_without_graph, value))
        return value if all(map(operator.is_, items, value)) else items
    return value


def _given_back(kept: Any, copies: dict[int, torch.Tensor]) -> Any:
    """The value that was kept; tensors that were written to since are replaced by ``copies``, by their id."""
    if isinstance(kept, _Graphless):
        kept = kept.get()
    if type(kept) is _Items or (copies and type(kept) is tuple):
        return tuple([_given_back(item, copies) for item in kept])
    return copies.get(id(kept), kept)


def _is_kept(value: Any, kept: Any) -> bool:
    """Whether ``kept`` stands for ``value``."""
    if isinstance(kept, _Graphless):
        return value is not None and kept._reference() is value
    if type(kept) is _Items:
        return type(value) is tuple and len(value) == len(kept) and all(map(_is_kept, value, kept))
    return value is kept


class Contents:
    """Of all objects of a block, at one moment. Keeps no graph alive."""

    __slots__ = ("_containers", "_entries", "_layout", "_objects", "_remaining", "_tensors", "_versions", "weights")

    def __init__(self, layout: Layout, entries: Sequence[Any]) -> None:
        """``entries``: what the tables of ``layout`` contain now."""
        self._layout, self._entries = layout, entries
        self.weights = layout.registered("_parameters", entries)
        with without_torch_function():
            self._versions = [(weight, weight._version) for weight in self.weights if not weight.is_inference()]
        self._containers: list[tuple[Any, Any]] = []
        # Attributes of objects, by the object's id: a config belongs to many modules.
        self._objects: dict[int, tuple[Any, Any]] = {}
        self._tensors: list[tuple[weakref.ref[torch.Tensor], int, torch.Tensor | None]] = []  # version, copy
        remaining = layout.remaining()
        for value in (*layout.registered("_buffers", entries), *remaining):
            self._see(value)
        self._remaining = list(map(_without_graph, remaining))

    def _see(self, value: Any, depth: int = 0) -> None:
        """Note what a value contains."""
        match sort_of(type(value)):
            case "" | "module":
                self._see_object(value)
            case "tensor" if not value.is_inference():
                self._tensors.append((weakref.ref(value), value._version, _copy_of(value)))
            case "generator":
                self._containers.append((value, _content(value)))
            case "array" if value.nbytes <= _COPIED_BYTES and value.dtype != object:
                self._containers.append((value, _content(value)))
            case "tuple" if depth < _DEPTH:
                for item in value[:_ITEMS]:
                    self._see(item, depth + 1)
            case "container":
                self._containers.append((value, _content(value)))
                if len(value) <= _ITEMS and depth < _DEPTH:
                    for item in list(value.values() if isinstance(value, dict) else value):
                        self._see(item, depth + 1)

    def _see_object(self, value: Any) -> None:
        """Note the attributes of an object that is no container. The block's own modules are in the layout."""
        if id(value) in self._objects or isinstance(value, (type, types.ModuleType)):
            return
        if isinstance(value, nn.Module) and any(value is module for module in self._layout.modules):
            return
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict and attributes:
            self._objects[id(value)] = attributes, _content(attributes)

    def unchanged(self, *, look_inside: bool) -> bool:
        """Whether all of it is as it was, besides attributes and what ``written_to`` tells. ``look_inside``: compare
        small tensors too, for which the host waits: a write through ``.data`` does not count as one."""
        return (
            not self.written()
            and self._layout.holds(self._entries)
            and all(itertools.starmap(_is_same, self._containers))
            and not (look_inside and any(map(_differs, self._tensors)))
        )

    def written_to(self) -> bool:
        """Whether a tensor of which there is no copy was changed in place."""
        with without_torch_function():
            if any(weight._version != at for weight, at in self._versions):
                return True
        return any(copy is None for _, copy in self.written())

    def written(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The tensors, neither parameters nor arguments, that were changed in place; with copies of what they were."""
        alive = ((reference(), at, copy) for reference, at, copy in self._tensors)
        return [(tensor, copy) for tensor, at, copy in alive if tensor is not None and tensor._version != at]

    def restore(self) -> Callable[[], None]:
        """Set what was there. Returns a call that sets what is there now, whatever the second run has set meanwhile:
        it is cut short, before it would have undone that itself."""
        # The former values of tensors that were changed in place, by their id. The second run may write to them, and
        # there may be a third.
        copies = {id(tensor): copy.clone() for tensor, copy in self.written() if copy is not None}
        found = [*self._containers, *self._objects.values()]
        is_there = not copies and self._is_there()
        if not is_there:
            found += self._of_modules()
        now = [(value, _content(value, strongly=True)) for value, _ in found]  # the second run may drop what it finds
        _put(found, copies)

        def set_back() -> None:
            _put(now, {})
            if is_there and not self._is_there():
                _put(self._of_modules(), {})

        return set_back

    def _is_there(self) -> bool:
        """Whether modules and tables have the objects that they had."""
        return self._layout.is_there(self._entries) and _are_kept(self._layout.remaining(), self._remaining)

    def _of_modules(self) -> list[tuple[Any, Any]]:
        """The modules with their attributes, and their tables with what they contained. Modules come twice: while a
        parameter has a name, no attribute of that name is set, and the tables may be about to free it."""
        layout = self._layout
        attributes = list(map(dict, layout.fixed))
        for (number, name), value in zip(layout.rest, self._remaining, strict=True):
            attributes[number][name] = value
        modules = list(zip(layout.modules, attributes, strict=True))
        return [*modules, *layout.filled(self._entries), *modules]


def _copy_of(tensor: torch.Tensor) -> torch.Tensor | None:
    is_small = has_plain_storage(tensor) and tensor.nbytes <= _COPIED_BYTES and not tensor.requires_grad
    return tensor.clone() if is_small else None


def _differs(entry: tuple[weakref.ref[torch.Tensor], int, torch.Tensor | None]) -> bool:
    reference, _, copy = entry
    tensor = reference()
    if copy is None or tensor is None:
        return False
    with torch.no_grad():  # by their bytes: NaN is not equal to itself
        return not torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, copy)))


def _content(value: Any, *, strongly: bool = False) -> Any:
    """A copy that keeps no graph, unless ``strongly``. Not by the object's own ``copy``: a subclass may do anything
    there."""
    match sort_of(type(value)):
        case "generator":
            return _state_of(value)
        case "array":
            return value.copy()
        case "module":
            kept: Any = attributes_of(value)
        case _:
            kept = dict(value) if isinstance(value, dict) else list(value)
    values = kept.values() if isinstance(kept, dict) else kept
    if strongly or not any(issubclass(kind, (torch.Tensor, tuple)) for kind in set(map(type, values))):
        return kept
    graphless = map(_without_graph, values)
    return dict(zip(kept, graphless, strict=True)) if isinstance(kept, dict) else list(graphless)


def _is_same(value: Any, before: Any) -> bool:
    match sort_of(type(value)):
        case "generator" | "array":
            now = _content(value)
            return bool(now.tobytes() == before.tobytes() if isinstance(now, np.ndarray) else now == before)
        case "module":
            now = attributes_of(value)
            return now.keys() == before.keys() and all(_is_kept(now[name], kept) for name, kept in before.items())
    if len(value) != len(before):
        return False
    if isinstance(value, set):
        return value == set(before)
    if isinstance(value, dict):
        # In this order: the block may go through it.
        if not all(map(operator.is_, value, before)):
            return False
        value, before = value.values(), before.values()
    return _are_kept(value, before)


def _are_kept(values: Collection[Any], kept: Collection[Any]) -> bool:
    """Most are the same object: then no Python runs."""
    return all(map(operator.is_, values, kept)) or all(map(_is_kept, values, kept))


def _put(entries: Iterable[tuple[Any, Any]], copies: dict[int, torch.Tensor]) -> None:
    """Give modules, containers and generators what they contained before; see ``_given_back``."""
    for value, before in entries:
        if copies or not _is_same(value, before):
            _fill(value, before, copies)


def _fill(value: Any, before: Any, copies: dict[int, torch.Tensor]) -> None:
    """Give one of them what it contained before; a container by the methods of its base class."""
    match sort_of(type(value)):
        case "generator":
            _set_state(value, before)
        case "array":
            value[...] = before
        case "module":
            parameters = value._parameters
            for name in attributes_of(value).keys() - before.keys():
                del value.__dict__[name]
            for name, item in before.items():
                if name not in parameters:
                    value.__dict__[name] = _given_back(item, copies)
        case _ if isinstance(value, dict):
            base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
            base.clear(value)
            for name, item in before.items():
                base.__setitem__(value, name, _given_back(item, copies))
        case _:
            base = next(base for base in CONTAINERS if isinstance(value, base))
            base.clear(value)
            (base.update if base is set else base.extend)(value, [_given_back(item, copies) for item in before])


def _state_of(generator: Any) -> Any:
    """Its state, to compare."""
    match generator:
        case torch.Generator():
            return generator.get_state().numpy().tobytes()
        case random.Random():
            return generator.getstate()
        case np.random.Generator():
            return pickle.dumps(generator.bit_generator.state)
        case _:
            return pickle.dumps(generator.get_state(legacy=False))


def _set_state(generator: Any, state: Any) -> None:
    match generator:
        case torch.Generator():
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        case random.Random():
            generator.setstate(state)
        case np.random.Generator():
            generator.bit_generator.state = pickle.loads(state)
        case _:
            generator.set_state(pickle.loads(state))
