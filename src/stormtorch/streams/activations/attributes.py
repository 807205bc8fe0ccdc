"""The attributes of a block's modules, as a forward found them.

A block that counts its calls, keeps a memory from call to call or leaves an auxiliary loss behind changes attributes of
its modules. Running it again in backward is right only if it finds the attributes of the first run and leaves no
changes. So a copy of each module's ``__dict__`` is taken before the block runs, and is put back during the second run.
Most modules never change theirs: for these the last copy is compared, which takes about a microsecond a module.

The copy is shallow. The contents of lists, dicts and random generators, and a module's parameters, buffers and
children, are compared as well: a block that changes these may not run again. If other code changes them before
backward, they are restored for the second run. Tensors are too large to copy: one that is written to before backward is
an error."""

from __future__ import annotations

import contextlib
import itertools
import operator
import types
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

# Hooks are checked elsewhere; our own wrapper of the call comes and goes.
_OF_TORCH = (frozenset(vars(nn.Module())) - {"training"}) | {"_call_impl", "_compiled_call_impl"}
_CONTAINERS = (list, dict, set, deque)
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, types.FunctionType, type)


class _Weakly:
    """Refers to a tensor that has a graph. A class of its own: attributes of user code may be weak references too."""

    __slots__ = ("reference",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.reference = weakref.ref(tensor)


class _Tables:
    """Parameters, buffers and children of modules at one moment. A block has dozens of these dicts: comparing them one
    by one would take longer than a small block."""

    __slots__ = ("_names", "_sizes", "_tables", "_values")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._tables = [table for m in modules for table in (m._parameters, m._buffers, m._modules)]
        self._sizes, self._names = list(map(len, self._tables)), list(_chained(self._tables))
        self._values = list(_chained(map(_values_of, self._tables)))

    def unchanged(self) -> bool:
        # With the same sizes, they are equally long one after the other.
        return (
            list(map(len, self._tables)) == self._sizes
            and all(map(operator.is_, self._names, _chained(self._tables)))
            and all(map(operator.is_, self._values, _chained(map(_values_of, self._tables))))
        )

    def each(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Each dict, and what it contained."""
        entries = zip(self._names, self._values, strict=True)
        for table, size in zip(self._tables, self._sizes, strict=True):
            yield table, dict(itertools.islice(entries, size))


_chained, _values_of = itertools.chain.from_iterable, operator.methodcaller("values")


class Contents:
    """What the objects of a block contain at one moment."""

    __slots__ = ("_containers", "_tables", "_versions")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._tables = _Tables(modules)
        self._containers: list[tuple[Any, Any]] = []
        self._versions: list[tuple[weakref.ref[torch.Tensor], int]] = []
        for module in modules:
            for buffer in module._buffers.values():
                self.see(buffer)

    def see(self, value: Any) -> None:
        """Note what an attribute contains."""
        match _sort_of(type(value)):
            case "tensor" if not value.is_inference():
                self._versions.append((weakref.ref(value), value._version))
            case "container" | "generator":
                self._containers.append((value, _content(value)))

    def unchanged(self) -> bool:
        return not self.written_to() and self._tables.unchanged() and all(itertools.starmap(_is_same, self._containers))

    def written_to(self) -> bool:
        """Whether one of the tensors was changed in place."""
        return any((tensor := reference()) is not None and tensor._version != at for reference, at in self._versions)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore what the containers contained; afterwards their present contents."""
        found = itertools.chain(self._containers, () if self._tables.unchanged() else self._tables.each())
        changed = [entry for entry in found if not _is_same(*entry)]
        now = [(value, _content(value)) for value, _ in changed]
        for value, before in changed:
            _fill(value, before)
        try:
            yield
        finally:
            for value, present in now:
                _fill(value, present)


class Look:
    """A module's attributes at one moment, without torch's own. Holds no graph: a tensor that has one is referred to
    weakly."""

    __slots__ = ("found", "module")

    def __init__(self, module: nn.Module, contents: Contents) -> None:
        self.module, self.found = module, _own(module)
        for name, value in list(self.found.items()):
            if isinstance(value, torch.Tensor) and name in module._parameters:
                del self.found[name]  # the device view of a streamed parameter, which calls.py installs and removes
                continue
            contents.see(value)
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                # A tensor that the block computed with is kept alive by its graph; any other need not come back.
                self.found[name] = _Weakly(value)

    def is_there(self) -> bool:
        """Whether the module surely has these attributes now. False where it takes longer to find out."""
        return False


class Known:
    """The attributes of a module whose values cannot change inside, to compare with. Keeps no object alive that user
    code may drop: numbers, words and functions only, and weak references to the rest."""

    __slots__ = ("_count", "_names", "_values", "module", "rest")

    def __init__(self, module: nn.Module, values: dict[str, Any], rest: list[tuple[str, weakref.ref[Any]]]) -> None:
        self.module, self._count, self.rest = module, len(module.__dict__), rest
        self._names, self._values = list(values), list(values.values())

    @classmethod
    def of(cls, module: nn.Module) -> Known | None:
        """None if a value may change inside, or can only be kept by keeping it alive."""
        values, rest = _own(module), []
        for name, value in list(values.items()):
            sort = _sort_of(type(value))
            if sort == "plain":
                continue
            if sort:
                return None
            try:
                rest.append((name, weakref.ref(value)))
            except TypeError:
                return None
            del values[name]
        return cls(module, values, rest)

    def is_there(self) -> bool:
        """Whether the module has these attributes now."""
        now = self.module.__dict__
        try:
            return (
                len(now) == self._count
                and all(map(operator.is_, map(now.__getitem__, self._names), self._values))
                and all(now[name] is reference() for name, reference in self.rest)
            )
        except KeyError:
            return False

    def found(self, rest: Sequence[Any]) -> dict[str, Any]:
        """The attributes, with the objects of ``rest``."""
        names = (*self._names, *(name for name, _ in self.rest))
        return dict(zip(names, (*self._values, *rest), strict=True))


class Same:
    """A look at a module whose attributes are those that are known. Keeps them alive, as the module does."""

    __slots__ = ("_kept", "_known", "is_there", "module")

    def __init__(self, known: Known) -> None:
        self.module, self.is_there, self._known = known.module, known.is_there, known
        self._kept = [reference() for _, reference in known.rest] if known.rest else ()

    @property
    def found(self) -> dict[str, Any]:
        return self._known.found(self._kept)


class Looks:
    """Looks at a block's modules, and remembers what is known of each one; not of one that was found changed twice in a
    row."""

    __slots__ = ("_changed", "_known", "modules")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules, self._changed = modules, [0] * len(modules)  # how often, since it was found the same
        self._known: list[Known | None] = [None] * len(modules)

    def now(self, contents: Contents) -> list[Look | Same]:
        looks: list[Look | Same] = []
        for number, known in enumerate(self._known):
            if known is not None and known.is_there():
                self._changed[number] = 0
                looks.append(Same(known))
                continue
            looks.append(Look(self.modules[number], contents))
            self._changed[number] += 1
            self._known[number] = Known.of(self.modules[number]) if self._changed[number] <= 2 else None
        return looks


class Attributes:
    """The attributes at construction, and what they contained."""

    __slots__ = ("_before", "contents")

    def __init__(self, looks: Looks) -> None:
        self.contents = Contents(looks.modules)
        self._before = looks.now(self.contents)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Set the attributes of the first run; afterwards restore the present ones, whatever the run has set."""
        now = [None if look.is_there() else _own(look.module) for look in self._before]  # None: those of the first run
        for look, own in zip(self._before, now, strict=True):
            if own is not None:
                _put(look.module, look.found, own)
        try:
            with self.contents.again():
                yield
        finally:
            for look, own in zip(self._before, now, strict=True):
                if own is not None or not look.is_there():
                    _put(look.module, look.found if own is None else own, _own(look.module))


_sorts: dict[type, str] = {}


def _sort_of(kind: type) -> str:
    """How to compare a value of this type. By type: asking an object of transformers for its class takes
    microseconds."""
    if kind not in _sorts:
        known = (("tensor", torch.Tensor), ("container", _CONTAINERS), ("generator", torch.Generator))
        sort = next((sort for sort, kinds in known if issubclass(kind, kinds)), "")
        _sorts[kind] = "plain" if kind in _PLAIN else sort
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
        tensor = value.reference() if isinstance(value, _Weakly) else value
        if tensor is not None or value is None:
            there[name] = tensor
    for name in own.keys() - values.keys() - parameters.keys():
        del there[name]


def _is_same(value: Any, before: Any) -> bool:
    if isinstance(value, torch.Generator):
        return torch.equal(value.get_state(), before)
    if len(value) != len(before):
        return False
    if isinstance(value, dict):
        # In this order: the block may go through it.
        return all(map(operator.is_, value, before)) and all(map(operator.is_, value.values(), before.values()))
    if isinstance(value, set):
        return bool(value == before)
    return all(map(operator.is_, value, before))


def _content(value: Any) -> Any:
    return value.get_state() if isinstance(value, torch.Generator) else value.copy()


def _fill(value: Any, contents: Any) -> None:
    """Give a container or a generator the ``contents`` that it had at another time."""
    if isinstance(value, torch.Generator):
        value.set_state(contents)
        return
    value.clear()
    (value.update if isinstance(value, (dict, set)) else value.extend)(contents)
