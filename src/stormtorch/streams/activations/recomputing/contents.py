"""What the objects of a block contain, besides which objects they are (attributes.py).

The contents of lists, dicts, arrays and random generators, and a module's parameters, buffers and children, are noted
before the block runs. A block that changes these may not run again. If other code changes them before backward, they
are restored for the second run, and what that run changes is undone.

Tensors are too large to copy. One that is written to before backward is an error, as it is in plain PyTorch where
autograd has saved it. Small ones, such as counters and scales, are copied, and the second run computes with the copy.

Attributes of other objects, such as a config or a counter of calls, may change: they are restored as the modules' own
are."""

from __future__ import annotations

import itertools
import operator
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ....core.sizes import KiB
from ...bridge.torch_private import has_plain_storage, without_torch_function

_COPIED_BYTES = 64 * KiB  # tensors and arrays up to this size are copied
_ITEMS, _DEPTH = 256, 4  # of containers: those that are looked into
_CONTAINERS = (list, dict, set, deque)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, type(lambda: None), type)
_sorts: dict[type, str] = {}
_chained, _values_of = itertools.chain.from_iterable, operator.methodcaller("values")


def sort_of(kind: type) -> str:
    """How to compare a value of this type; empty: only whether it is the same object. By type: asking an object of
    transformers for its class takes microseconds."""
    if kind not in _sorts:
        sorts: tuple[tuple[str, Any], ...] = (
            ("tensor", torch.Tensor), ("container", _CONTAINERS), ("tuple", tuple),
            ("generator", _GENERATORS), ("array", np.ndarray),
        )  # fmt: skip
        sort = next((sort for sort, kinds in sorts if issubclass(kind, kinds)), "")
        _sorts[kind] = "plain" if kind in _PLAIN else sort
    return _sorts[kind]


class Graphless:
    """Stands for a tensor that has a graph, and does not keep that alive."""

    __slots__ = ("_data", "_reference")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference, self._data = weakref.ref(tensor), tensor.detach()

    def get(self) -> torch.Tensor:
        """The tensor; if it is gone, one with its values, of which operations save as much."""
        tensor = self._reference()
        return self._data.detach().requires_grad_() if tensor is None else tensor


def without_graph(value: Any) -> Any:
    """``value``, to be kept: a tensor that has a graph, also in tuples, is replaced."""
    if isinstance(value, torch.Tensor):
        return Graphless(value) if value.grad_fn is not None else value
    if type(value) is tuple:
        items = tuple([without_graph(item) for item in value])
        return value if all(map(operator.is_, items, value)) else _Items(items)
    return value


class _Items:
    """Stands for a tuple in which tensors were replaced."""

    __slots__ = ("items",)

    def __init__(self, items: tuple[Any, ...]) -> None:
        self.items = items


def given_back(kept: Any, copies: dict[int, torch.Tensor]) -> Any:
    """The value that was kept; tensors that were written to since are replaced by ``copies``, by their id."""
    if isinstance(kept, Graphless):
        kept = kept.get()
    if isinstance(kept, _Items):
        return tuple([given_back(item, copies) for item in kept.items])
    if copies and type(kept) is tuple:
        return tuple([given_back(item, copies) for item in kept])
    return copies.get(id(kept), kept) if copies else kept


def is_kept(value: Any, kept: Any) -> bool:
    """Whether ``kept`` stands for ``value``."""
    if isinstance(kept, Graphless):
        return value is not None and kept._reference() is value
    if isinstance(kept, _Items):
        return type(value) is tuple and len(value) == len(kept.items) and all(map(is_kept, value, kept.items))
    return value is kept


class Tables:
    """Parameters, buffers and children of modules. A block has dozens of these dicts: comparing them one by one would
    take longer than a small block. Kept from call to call, so it holds their values weakly."""

    __slots__ = ("_filled", "_modules", "_names", "_references", "_sizes", "_tables")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules, self._tables = modules, list(_tables_of(modules))
        self._sizes, self._filled = list(map(len, self._tables)), [table for table in self._tables if table]
        self._names = list(_chained(self._filled))
        self._references = [_nothing if value is None else weakref.ref(value) for value in self.values()]

    def values(self) -> list[Any]:
        """What they contain now."""
        return list(_chained(map(_values_of, self._filled)))

    def unchanged(self, values: Sequence[Any] | None = None) -> bool:
        """Whether they contain what they did. ``values``: that, where the caller has it: following weak references
        takes longer."""
        before = map(operator.call, self._references) if values is None else values
        # With the same sizes, they are equally long one after the other.
        return (
            all(map(operator.is_, _tables_of(self._modules), self._tables))  # user code may replace a whole dict
            and list(map(len, self._tables)) == self._sizes
            and all(map(operator.is_, self._names, _chained(self._filled)))
            and all(map(operator.is_, before, _chained(map(_values_of, self._filled))))
        )

    def fill(self, values: Sequence[Any]) -> Callable[[], None]:
        """Make the modules' tables these again, with ``values``. Returns a call that undoes it."""
        now = [(module, name, module.__dict__[name]) for module in self._modules for name in _TABLES]
        before = [(table, dict(table)) for table in {id(t): t for t in (*self._tables, *(e[2] for e in now))}.values()]
        entries = zip(self._names, values, strict=True)
        for (module, name, there), table, size in zip(now, self._tables, self._sizes, strict=True):
            if there is not table:
                module.__dict__[name] = table
            _fill(table, dict(itertools.islice(entries, size)), {})

        def undo() -> None:
            for module, name, there in now:
                if module.__dict__[name] is not there:
                    module.__dict__[name] = there
            for table, content in before:
                _fill(table, content, {})

        return undo


_TABLES = ("_parameters", "_buffers", "_modules")


_its_tables = operator.itemgetter(*_TABLES)


def _tables_of(modules: Sequence[nn.Module]) -> Iterable[Any]:
    return _chained(map(_its_tables, map(vars, modules)))


def _nothing() -> None:
    """In place of a weak reference to None."""


class Contents:
    """Of all objects of a block, at one moment."""

    __slots__ = ("_containers", "_modules", "_objects", "_tables", "_tensors", "_values", "_weights")

    def __init__(self, modules: Sequence[nn.Module], tables: Tables) -> None:
        self._modules, self._tables, self._values = modules, tables, tables.values()
        with without_torch_function():
            weights = [v for v in self._values if isinstance(v, nn.Parameter) and not v.is_inference()]
            self._weights = [(weight, weight._version) for weight in weights]
        self._containers: list[tuple[Any, Any]] = []
        # Attributes of objects, by the object's id: a config belongs to many modules.
        self._objects: dict[int, tuple[Any, Any]] = {}
        self._tensors: list[tuple[weakref.ref[torch.Tensor], int, torch.Tensor | None]] = []  # version, copy
        for module in modules:
            if module._buffers:
                for buffer in module._buffers.values():
                    self.see(buffer)

    def see(self, value: Any, depth: int = 0) -> None:
        """Note what a value contains."""
        match sort_of(type(value)):
            case "tensor" if not value.is_inference():
                self._tensors.append((weakref.ref(value), value._version, _copy_of(value)))
            case "container":
                self._containers.append((value, _content(value)))
                if len(value) <= _ITEMS and depth < _DEPTH:
                    for item in list(value.values() if isinstance(value, dict) else value):
                        self.see(item, depth + 1)
            case "tuple" if depth < _DEPTH:
                for item in value[:_ITEMS]:
                    self.see(item, depth + 1)
            case "generator":
                self._containers.append((value, _content(value)))
            case "":
                self.see_object(value)
            case "array" if value.nbytes <= _COPIED_BYTES and value.dtype != object:
                self._containers.append((value, value.copy()))

    def see_object(self, value: Any) -> None:
        """Note the attributes of an object that is no container. The block's own modules are looked at elsewhere."""
        if id(value) in self._objects or isinstance(value, (type, types.ModuleType)):
            return
        if isinstance(value, nn.Module) and any(value is module for module in self._modules):
            return
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict and attributes:
            self._objects[id(value)] = attributes, _content(attributes)

    def unchanged(self, *, look_inside: bool) -> bool:
        """Whether all of it is as it was, besides what ``written_to`` tells. ``look_inside``: compare small tensors
        too, for which the host waits: a write through ``.data`` does not count as one."""
        return (
            not self.tensors_changed()
            and self._tables.unchanged(self._values)
            and all(itertools.starmap(_is_same, self._containers))
            and not (look_inside and any(map(_differs, self._tensors)))
        )

    def written_to(self) -> bool:
        """Whether a tensor of which there is no copy was changed in place."""
        with without_torch_function():
            if any(weight._version != at for weight, at in self._weights):
                return True
        return any(
            copy is None and (tensor := reference()) is not None and tensor._version != at
            for reference, at, copy in self._tensors
        )

    def copies(self) -> dict[int, torch.Tensor]:
        """The former values of tensors that were changed in place, by their id."""
        found: dict[int, torch.Tensor] = {}
        for reference, at, copy in self._tensors:
            if copy is not None and (tensor := reference()) is not None and tensor._version != at:
                found[id(tensor)] = copy.clone()  # the second run may write to it, and there may be a third
        return found

    def tensors_changed(self) -> bool:
        """Whether a tensor that is neither parameter nor argument was changed in place."""
        return any((tensor := reference()) is not None and tensor._version != at for reference, at, _ in self._tensors)

    def restore(self, copies: dict[int, torch.Tensor]) -> Callable[[], None]:
        """Restore what was there. Returns a call that restores what is there now, also where only the second run has
        changed it."""
        found = [*self._containers, *self._objects.values()]
        now = [(value, _content(value, strongly=True)) for value, _ in found]  # the second run may drop what it finds
        for value, before in found:
            if copies or not _is_same(value, before):
                _fill(value, before, copies)
        undo = None
        if copies or not self._tables.unchanged(self._values):
            undo = self._tables.fill([given_back(value, copies) for value in self._values])

        def set_back() -> None:
            for value, present in now:
                if not _is_same(value, present):
                    _fill(value, present, {})
            if undo is not None:
                undo()
            elif not self._tables.unchanged(self._values):
                self._tables.fill(self._values)

        return set_back


def _copy_of(tensor: torch.Tensor) -> torch.Tensor | None:
    if not has_plain_storage(tensor) or tensor.nbytes > _COPIED_BYTES or tensor.requires_grad:
        return None
    with torch.no_grad():
        return tensor.clone()


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
    if strongly and type(value) is dict:
        return dict(value)
    if isinstance(value, _GENERATORS):
        return _state_of(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        kept = dict(value)
        if not strongly and _may_have_graphs(kept.values()):
            return {name: without_graph(item) for name, item in kept.items()}
        return kept
    kept_items = list(value)
    may_have = not strongly and _may_have_graphs(kept_items)
    return [without_graph(item) for item in kept_items] if may_have else kept_items


def _may_have_graphs(values: Iterable[Any]) -> bool:
    return any(issubclass(kind, (torch.Tensor, tuple)) for kind in set(map(type, values)))


def _is_same(value: Any, before: Any) -> bool:
    if sort_of(type(value)) in ("generator", "array"):
        now = _content(value)
        return bool(now.tobytes() == before.tobytes() if isinstance(now, np.ndarray) else now == before)
    if len(value) != len(before):
        return False
    if isinstance(value, dict):
        # In this order: the block may go through it. Most values are the same object: then no Python runs.
        if not all(map(operator.is_, value, before)):
            return False
        kept = before.values()
        return all(map(operator.is_, value.values(), kept)) or all(map(is_kept, value.values(), kept))
    if isinstance(value, set):
        return value == set(before)
    return all(map(operator.is_, value, before)) or all(map(is_kept, value, before))


def _fill(value: Any, before: Any, copies: dict[int, torch.Tensor]) -> None:
    """Give a container or a generator what it contained before, by the methods of its base class."""
    if isinstance(value, _GENERATORS):
        _set_state(value, before)
    elif isinstance(value, np.ndarray):
        value[...] = before
    elif isinstance(value, dict):
        base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        base.clear(value)
        for name, item in before.items():
            base.__setitem__(value, name, given_back(item, copies))
    else:
        base = next(base for base in (list, set, deque) if isinstance(value, base))
        base.clear(value)
        (base.update if base is set else base.extend)(value, [given_back(item, copies) for item in before])


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return _Comparable(generator.bit_generator.state)
    return _Comparable(generator.get_state(legacy=False))


class _Comparable:
    """A state of numpy's, a dict that may contain arrays."""

    __slots__ = ("state", "words")

    def __init__(self, state: Any) -> None:
        self.state, self.words = (
            state,
            repr({**state, "state": {k: np.asarray(v).tolist() for k, v in state["state"].items()}}),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Comparable) and self.words == other.words

    __hash__ = None  # type: ignore[assignment]


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state.state
    else:
        generator.set_state(state.state)
