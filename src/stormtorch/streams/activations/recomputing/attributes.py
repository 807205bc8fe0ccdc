"""The attributes of a block's modules, as a forward found them.

A block that counts its calls, keeps a memory from call to call or leaves an auxiliary loss behind changes attributes of
its modules. Running it again in backward is right only if it finds the attributes of the first run and leaves no
changes. So a copy of each module's ``__dict__`` is taken before the block runs, and is put back during the second run.
Most modules never change theirs: for these the last copy is compared, all of a block at once.

The copy is shallow; contents.py is about what the values contain."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .contents import Contents, Tables, given_back, is_kept, sort_of, without_graph

# Hooks are checked elsewhere; our own wrapper of the call comes and goes.
_OF_TORCH = (frozenset(vars(nn.Module())) - {"training"}) | {"_call_impl", "_compiled_call_impl"}


class Look:
    """A module's attributes at one moment, without torch's own. Holds no graph."""

    __slots__ = ("found", "module")

    def __init__(self, module: nn.Module, contents: Contents) -> None:
        self.module, self.found = module, _own(module)
        for name, value in list(self.found.items()):
            if isinstance(value, torch.Tensor) and name in module._parameters:
                del self.found[name]  # the device view of a streamed parameter, which calls.py installs and removes
                continue
            contents.see(value)
            self.found[name] = without_graph(value)

    def is_there(self) -> bool:
        """Whether the module surely has these attributes now. False where it takes longer to find out."""
        return False


class Known:
    """The attributes of a module whose values cannot change inside, to compare with. Keeps no object alive that user
    code may drop: numbers, words and functions only, and weak references to the rest."""

    __slots__ = ("count", "module", "names", "rest", "values")

    def __init__(self, module: nn.Module, values: dict[str, Any], rest: list[tuple[str, weakref.ref[Any]]]) -> None:
        self.module, self.count, self.rest = module, len(module.__dict__), rest
        self.names, self.values = list(values), list(values.values())

    @classmethod
    def of(cls, module: nn.Module) -> Known | None:
        """None if a value may change inside, or can only be kept by keeping it alive."""
        values, rest = _own(module), []
        for name, value in list(values.items()):
            sort = sort_of(type(value))
            if sort == "plain" or (sort == "tuple" and all(sort_of(type(item)) == "plain" for item in value)):
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
                len(now) == self.count
                and all(map(operator.is_, map(now.__getitem__, self.names), self.values))
                and all(now[name] is reference() for name, reference in self.rest)
            )
        except KeyError:
            return False

    def found(self, rest: Sequence[Any]) -> dict[str, Any]:
        """The attributes, with the objects of ``rest``."""
        names = (*self.names, *(name for name, _ in self.rest))
        return dict(zip(names, (*self.values, *rest), strict=True))


class AllKnown:
    """The same of all modules of a block, compared at once."""

    __slots__ = ("_counts", "_getters", "_modules", "_rest", "_values", "known")

    def __init__(self, known: list[Known]) -> None:
        self.known, self._counts = known, [each.count for each in known]
        self._modules = [each.module for each in known]
        # With two names or more, a getter returns a tuple.
        self._getters = [operator.itemgetter("_parameters", "_buffers", *each.names) for each in known]
        tables = ((each.module._parameters, each.module._buffers, *each.values) for each in known)
        self._values = list(itertools.chain.from_iterable(tables))
        self._rest = [(each.module, name, reference) for each in known for name, reference in each.rest]

    def is_there(self) -> bool:
        """Whether all modules have these attributes now."""
        dicts = list(map(vars, self._modules))
        found = itertools.chain.from_iterable(map(operator.call, self._getters, dicts))
        try:
            return (
                list(map(len, dicts)) == self._counts
                and all(map(operator.is_, found, self._values))
                and all(vars(module)[name] is reference() for module, name, reference in self._rest)
            )
        except KeyError:
            return False

    def kept(self) -> list[Any]:
        """The objects to which there are weak references only."""
        return [reference() for _, _, reference in self._rest]


class Same:
    """A look at a module whose attributes are those that are known. Keeps them alive, as the module does."""

    __slots__ = ("_known", "is_there", "kept", "module")

    def __init__(self, known: Known, kept: Sequence[Any]) -> None:
        self.module, self.is_there, self._known, self.kept = known.module, known.is_there, known, kept

    @property
    def found(self) -> dict[str, Any]:
        return self._known.found(self.kept)


class AllSame:
    """A look at a block whose attributes are all known."""

    __slots__ = ("_all", "_kept", "is_there")

    def __init__(self, known: AllKnown, kept: list[Any]) -> None:
        self._all, self._kept, self.is_there = known, kept, known.is_there

    def __iter__(self) -> Iterator[Same]:
        """Module by module."""
        kept = iter(self._kept)
        for known in self._all.known:
            yield Same(known, list(itertools.islice(kept, len(known.rest))))


class Some(list["Look | Same"]):
    """A look at a block, module by module."""

    def is_there(self) -> bool:
        return False


class Looks:
    """Looks at a block's modules, and remembers what is known of each one; not of one that was found changed twice in a
    row."""

    __slots__ = ("_all", "_changed", "_known", "modules")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules, self._changed = modules, [0] * len(modules)  # how often, since it was found the same
        self._known: list[Known | None] = [None] * len(modules)
        self._all: AllKnown | None = None  # if each module is known

    def now(self, contents: Contents) -> AllSame | Some:
        if self._all is not None and self._all.is_there():
            kept = self._all.kept()
            for value in kept:
                contents.see_object(value)
            return AllSame(self._all, kept)
        looks = Some()
        for number, known in enumerate(self._known):
            if known is not None and known.is_there():
                self._changed[number] = 0
                same = Same(known, [reference() for _, reference in known.rest])
                for value in same.kept:
                    contents.see_object(value)
                looks.append(same)
                continue
            looks.append(Look(self.modules[number], contents))
            self._changed[number] += 1
            self._known[number] = Known.of(self.modules[number]) if self._changed[number] <= 2 else None
        every = [known for known in self._known if known is not None]
        self._all = AllKnown(every) if len(every) == len(self._known) else None
        return looks


class Attributes:
    """The attributes at construction, and what they contained."""

    __slots__ = ("_before", "contents")

    def __init__(self, looks: Looks, tables: Tables) -> None:
        """``tables``: as they are now."""
        self.contents = Contents(looks.modules, tables)
        self._before = looks.now(self.contents)

    def restore(self) -> Callable[[], None]:
        """Set the attributes of the first run, and what they contained. Returns a call that restores the present ones,
        whatever the second run has set meanwhile: it is cut short, before it would have undone that itself."""
        copies = self.contents.copies()
        before: list[Look | Same] | None = None
        now: list[dict[str, Any] | None] = []  # None: those of the first run
        if copies or not self._before.is_there():
            before = list(self._before)
            now = [None if look.is_there() and not copies else _own(look.module) for look in before]
            for look, own in zip(before, now, strict=True):
                if own is not None:
                    _put(look.module, look.found, own, copies)
        contents = self.contents.restore(copies)

        def set_back() -> None:
            contents()
            looks = before
            if looks is None:
                if self._before.is_there():
                    return
                looks = list(self._before)
            for look, own in itertools.zip_longest(looks, now):
                if own is not None or not look.is_there():
                    _put(look.module, look.found if own is None else own, _own(look.module), {})

        return set_back


def _own(module: nn.Module) -> dict[str, Any]:
    """A module's attributes that are not torch's own."""
    there = module.__dict__
    return {name: there[name] for name in there.keys() - _OF_TORCH}


def _put(module: nn.Module, values: dict[str, Any], own: dict[str, Any], copies: dict[int, torch.Tensor]) -> None:
    """Give ``module``, whose attributes are ``own``, those of ``values``; see ``given_back``."""
    there, parameters = module.__dict__, module._parameters
    for name, value in values.items():
        if name in parameters or (name in own and is_kept(own[name], value) and not copies):
            continue
        there[name] = given_back(value, copies)
    for name in own.keys() - values.keys() - parameters.keys():
        del there[name]
