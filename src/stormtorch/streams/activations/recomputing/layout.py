"""The attributes, parameters, buffers and children of a block's modules: which objects they are, not what is in them.

A block that counts its calls, keeps a memory from call to call or leaves an auxiliary loss behind changes attributes of
its modules. A block has dozens of dicts, most of which never change, and comparing them one by one would take longer
than a small block. So a layout is made once, and all of a block is compared with it at once, before each call of the
block and around its second run. Contents.py is about the objects themselves."""

from __future__ import annotations

import itertools
import operator
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

TABLES = ("_parameters", "_buffers", "_modules")
CONTAINERS = (list, dict, set, deque)
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
# Hooks are checked elsewhere; our own wrapper of the call comes and goes.
_OF_TORCH = (frozenset(vars(nn.Module())) - {"training", *TABLES}) | {"_call_impl", "_compiled_call_impl"}
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, type(lambda: None), type)
_sorts: dict[type, str] = {}
_chained, _values_of = itertools.chain.from_iterable, operator.methodcaller("values")
_its_tables = operator.itemgetter(*TABLES)


def sort_of(kind: type) -> str:
    """How to compare a value of this type; empty: only whether it is the same object. By type: asking an object of
    transformers for its class takes microseconds."""
    if kind not in _sorts:
        sorts: tuple[tuple[str, Any], ...] = (
            ("tensor", torch.Tensor), ("container", CONTAINERS), ("tuple", tuple),
            ("generator", GENERATORS), ("array", np.ndarray), ("module", nn.Module),
        )  # fmt: skip
        sort = next((sort for sort, kinds in sorts if issubclass(kind, kinds)), "")
        _sorts[kind] = "plain" if kind in _PLAIN else sort
    return _sorts[kind]


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, without torch's own and without device views of streamed parameters, which calls.py
    installs and removes."""
    there, parameters = module.__dict__, module._parameters
    return {name: there[name] for name in there.keys() - _OF_TORCH if name not in parameters}


class Layout:
    """Kept from call to call, so it keeps no object alive that user code may drop: it holds numbers, words, functions
    and the tables of modules, weak references to what the tables contain, and only the names of other attributes."""

    def __init__(self, modules: Sequence[nn.Module], past: Layout | None = None) -> None:
        """``past``: the layout before. An attribute that has another value now is not expected to keep this one."""
        self.modules = modules
        dicts, own = list(map(vars, modules)), list(map(attributes_of, modules))
        self._counts = list(map(len, dicts))
        self._changed: set[tuple[int, str]] = set()  # attributes that were found changed, by the module's number
        if past is not None:
            before = ((number, name, value) for number, each in enumerate(past.fixed) for name, value in each.items())
            found = {(number, name) for number, name, value in before if own[number].get(name, value) is not value}
            self._changed = past._changed | found
        # Attributes that the next call should find, by module; the tables always.
        self.fixed: list[dict[str, Any]] = [
            {name: value for name, value in each.items() if self._is_fixed(number, name, value)}
            for number, each in enumerate(own)
        ]
        self.rest = [(number, name) for number, each in enumerate(own) for name in each.keys() - self.fixed[number]]
        self._getters = [operator.itemgetter(*each) for each in self.fixed]
        self._values = list(_chained(map(_values_of, self.fixed)))
        self.tables: list[dict[str, Any]] = list(_tables_of(dicts))
        self._sizes, self._filled = list(map(len, self.tables)), [table for table in self.tables if table]
        self._views = list(map(_values_of, self._filled))  # of their values at any time
        self._names = list(_chained(self._filled))
        self._places: dict[str, list[int]] = {name: [] for name in TABLES}  # of entries that are not None
        self._references: list[Callable[[], Any]] = []
        self._dead: list[Any] = []  # references to entries that are gone: these give None, as entries that are None do
        for name, table in zip(itertools.cycle(TABLES), self.tables, strict=False):
            for value in table.values():
                if value is not None:
                    self._places[name].append(len(self._references))
                self._references.append(type(None) if value is None else weakref.ref(value, self._dead.append))

    def _is_fixed(self, number: int, name: str, value: Any) -> bool:
        """Whether a value cannot change inside, and the attribute has not changed so far."""
        if name in TABLES:
            return True
        sort = sort_of(type(value))
        is_plain = sort == "plain" or (sort == "tuple" and all(sort_of(type(item)) == "plain" for item in value))
        return is_plain and (number, name) not in self._changed

    def entries(self) -> list[Any]:
        """What the tables contain now."""
        return list(_chained(self._views))

    def registered(self, table: str, entries: Sequence[Any]) -> list[Any]:
        """The parameters or buffers among ``entries``, by the name of the tables that contain them."""
        return [entries[at] for at in self._places[table]]

    def remaining(self) -> list[Any]:
        """The values that the attributes have now that may change from call to call, or inside."""
        dicts = list(map(vars, self.modules))
        return [dicts[number][name] for number, name in self.rest]

    def filled(self, entries: Sequence[Any]) -> list[tuple[Any, Any]]:
        """The tables, and what they contain when all contain ``entries``."""
        pairs = zip(self._names, entries, strict=True)
        return [
            (table, dict(itertools.islice(pairs, size))) for table, size in zip(self.tables, self._sizes, strict=True)
        ]

    def holds(self, entries: Sequence[Any]) -> bool:
        """Whether the modules have these tables, which user code may replace, and those contain ``entries``."""
        return all(map(operator.is_, _tables_of(map(vars, self.modules)), self.tables)) and self._contains(entries)

    def _contains(self, entries: Iterable[Any]) -> bool:
        # With the same sizes, they are equally long one after the other.
        return (
            list(map(len, self.tables)) == self._sizes
            and all(map(operator.is_, self._names, _chained(self._filled)))
            and all(map(operator.is_, entries, _chained(self._views)))
        )

    def is_there(self, entries: Sequence[Any] | None = None) -> bool:
        """Whether the modules have these attributes, and the tables contain what they did. Of attributes that may
        change, only whether they exist. ``entries``: what the tables contained, where the caller has that: following
        weak references takes longer."""
        dicts = list(map(vars, self.modules))
        try:
            return (
                not self._dead
                and list(map(len, dicts)) == self._counts
                and all(map(operator.is_, _chained(map(operator.call, self._getters, dicts)), self._values))
                and all(name in dicts[number] for number, name in self.rest)
                and self._contains(map(operator.call, self._references) if entries is None else entries)
            )
        except KeyError:
            return False


def _tables_of(dicts: Iterable[dict[str, Any]]) -> Iterable[Any]:
    return _chained(map(_its_tables, dicts))
