"""What a block computes, operation by operation, and what of it has to be computed again if some results are at hand.

The tape knows for every operation which storages it reads and which it makes. Backward needs those that autograd saved.
Walking back from them shows which operations are *idle* once some results have been put aside: the product and the
rotation that lead to a query are, if the rotated query itself is there. So what a result saves is not the time of its
own operation alone, and what saves most per byte depends on what is there already: results are ranked one by one, each
given those before it.

Never idle are operations that write into what they are given, take random numbers, answer with numbers instead of
tensors, or are not known well enough. And none is where the sequence of operations is not the same whenever a block
runs, as under autocast, which casts a weight or finds it cast already; or where memory was filled by a kernel that is
not torch's, which may have read anything. Only the results of matrix products and attention are put aside then, which
no cast can be taken for."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..memory.stopwatch import Reading
from .torch_private import StorageReference, has_plain_storage

Operation = tuple[str, int]
"""An operation of a block: its name, and how many of that name came before it."""
_LEAST_S = 20e-6  # what saves less than that is not worth the trouble
_MOST = 16  # results of one block
_LOOKED_AT = 64  # those whose own operations take longest


_name_of = functools.cache(str)


class Numbering:
    """Names the operations of one run. ``before``: how many of each name have come already."""

    def __init__(self, before: Mapping[str, int] = MappingProxyType({})) -> None:
        self._seen: Counter[str] = Counter(before)

    def next(self, func: Any) -> Operation:
        name = _name_of(func)
        self._seen[name] += 1
        return name, self._seen[name] - 1


class Storages:
    """Numbers storages as they come up."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # by address
        self._known: list[StorageReference] = []  # while these are there, no other has their addresses

    def number(self, tensor: torch.Tensor) -> int:
        if not has_plain_storage(tensor):
            return -1
        address = _address(tensor)
        if address not in self._numbers:
            self._numbers[address] = len(self._known)
            self._known.append(StorageReference(tensor.untyped_storage()))
        return self._numbers[address]

    def known(self, tensor: torch.Tensor) -> int | None:
        """Its number if it has come up."""
        return self._numbers.get(_address(tensor)) if has_plain_storage(tensor) else None

    def passing(self, args: Any, result: Any) -> tuple[int, ...]:
        """What an operation was given, and gave."""
        return tuple(map(self.number, (*_tensors(args), *_tensors(result))))


def numbered_anew(flow: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The same for any two runs in which the same storages pass from operation to operation."""
    numbers = {-1: -1}
    return [tuple(numbers.setdefault(number, len(numbers) - 1) for number in step) for step in flow]


@dataclass(frozen=True, kw_only=True)
class Step:
    """``size``: bytes of its results, if they may be put aside; else 0. Storages are numbered."""

    operation: Operation
    reads: frozenset[int]
    makes: frozenset[int]
    size: int
    must_run: bool
    heavy: bool  # a matrix product, attention
    seconds: Reading


@dataclass(kw_only=True)
class _Opened:
    """A part that is running: where on the tape it began, and what was saved since."""

    part: str
    first_operation: int
    first_heavy: int
    first_step: int
    saved: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)  # into, by itself


@dataclass(eq=False)
class Tape:
    """Filled while a block runs: `add` for every operation, `save` for what autograd saves.

    ``parts`` are stretches of it that may be recomputed for themselves, each with a tape of its own, on which
    operations have the names that they have in the block. None for what runs twice, or inside of another."""

    is_sure: bool = True  # whether the same operations come whenever a block of this kind runs
    operations: list[Operation] = field(default_factory=list)  # all of them, also those that compute nothing
    heavy: list[Operation] = field(default_factory=list)  # matrix products, attention
    flow: list[tuple[int, ...]] = field(default_factory=list)  # storages that passed through each of the operations
    # Modules that have run the same operations since: whether with the same flow, which an attribute may decide.
    alike: weakref.WeakKeyDictionary[nn.Module, bool] = field(default_factory=weakref.WeakKeyDictionary)
    steps: list[Step] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)  # into, after they were made
    before: Counter[str] = field(default_factory=Counter)  # operations of the block that came before this part
    parts: dict[str, Tape | None] = field(default_factory=dict)
    written_by: dict[str, set[int]] = field(default_factory=dict)  # parts
    _opened: list[_Opened] = field(default_factory=list)
    _empty: set[int] = field(default_factory=set)  # storages that nobody has been seen to fill
    _storages: Storages = field(default_factory=Storages)

    def add(self, operation: Operation, args: Any, result: Any, *, kind: str, heavy: bool, seconds: Reading) -> None:
        """``kind``: "writes" into its arguments; "fixed" must run; "empty" is yet to be filled; "plain"."""
        self.operations.append(operation)
        self.heavy += [operation] * heavy
        self.flow.append(self._storages.passing(args, result))
        given, made = _tensors(args), _tensors(result)
        reads = frozenset(self.number(tensor) for tensor in given)
        if kind == "writes":
            self._empty -= reads
            for opened in self._opened:
                opened.written |= reads
        elif reads & self._empty:
            self.is_sure = False  # a kernel filled it that does not pass through here, from who knows what
        addresses = {tensor.untyped_storage()._cdata for tensor in given if has_plain_storage(tensor)}
        plain = [tensor for tensor in made if has_plain_storage(tensor)]
        fresh = [tensor for tensor in plain if _address(tensor) not in addresses]
        if kind != "writes" and made and len(plain) == len(made) and not fresh:
            return  # a view: nothing is computed
        makes = frozenset(self.number(tensor) for tensor in made)
        if kind == "writes":
            self.written |= reads  # which of them, does not matter
        elif kind == "empty":
            self._empty |= makes
            kind = "plain"
        known = len(fresh) == len(made) > 0 and all(type(tensor) is torch.Tensor for tensor in made)
        self.steps.append(
            Step(
                operation=operation,
                reads=reads,
                makes=makes,
                size=sum(tensor.nbytes for tensor in made) if kind == "plain" and known else 0,
                must_run=kind != "plain" or not known,
                heavy=heavy,
                seconds=seconds,
            )
        )

    def save(self, tensor: torch.Tensor) -> int:
        """Autograd saves ``tensor``; the number of its storage."""
        number = self.number(tensor)
        self.is_sure = self.is_sure and number not in self._empty
        for saved in (self.saved, *(opened.saved for opened in self._opened)):
            saved.add(number)
        return number

    def read(self, tensor: torch.Tensor) -> None:
        """The block looks at the values of ``tensor`` itself, and no operation shows it."""
        for saved in (self.saved, *(opened.saved for opened in self._opened)):
            saved.add(self.number(tensor))

    def need(self, tensor: torch.Tensor) -> None:
        """Somebody keeps ``tensor``, and will find there what the block leaves when it runs again."""
        number = self._storages.known(tensor)
        if number is not None:
            for tape in filter(None, (self, *self.parts.values())):
                tape.saved.add(number)

    def begin(self, part: str) -> None:
        """What comes now is ``part``'s, until `end`."""
        self._opened.append(
            _Opened(
                part=part,
                first_operation=len(self.operations),
                first_heavy=len(self.heavy),
                first_step=len(self.steps),
            )
        )

    def end(self) -> None:
        opened = self._opened.pop()
        alone = not self._opened and opened.part not in self.parts
        self.parts[opened.part] = self._stretch(opened) if alone else None
        self.written_by.setdefault(opened.part, set()).update(opened.written)

    def _stretch(self, opened: _Opened) -> Tape:
        """What needs to be computed again is only what was saved inside: what the part gave is there."""
        return Tape(
            is_sure=self.is_sure,
            operations=self.operations[opened.first_operation :],
            heavy=self.heavy[opened.first_heavy :],
            flow=numbered_anew(self.flow[opened.first_operation :]),
            steps=self.steps[opened.first_step :],
            saved=opened.saved,
            written=self.written,
            before=Counter(name for name, _ in self.operations[: opened.first_operation]),
        )

    def close(self) -> None:
        """The block is through: nothing is added any more."""
        for part in filter(None, self.parts.values()):
            part.is_sure = self.is_sure
        self.flow, self._storages = numbered_anew(self.flow), Storages()

    def number(self, tensor: torch.Tensor) -> int:
        """Of its storage."""
        return self._storages.number(tensor)

    def idle(self, aside: AbstractSet[Operation]) -> frozenset[Operation]:
        """The operations that need not run again if the results of ``aside`` are at hand; those not among them."""
        if not self.is_sure:
            return frozenset()
        needed, idle = set(self.saved), set()
        for step in reversed(self.steps):
            if step.operation in aside:
                continue
            if step.must_run or step.makes & needed:
                needed |= step.reads
            else:
                idle.add(step.operation)
        return frozenset(idle)

    def seconds(self) -> float | None:
        """What all operations took together, without what came between them; None while the device has not finished."""
        durations = [step.seconds() for step in self.steps]
        return None if None in durations else sum(duration or 0.0 for duration in durations)

    def ranking(self) -> dict[Operation, tuple[int, float]] | None:
        """Results worth putting aside, best first: their bytes, and the seconds that each saves given those before it.

        None while the device has not finished."""
        seconds = {step.operation: step.seconds() for step in self.steps}
        if any(duration is None for duration in seconds.values()):
            return None
        able = [step for step in self.steps if step.size and not step.makes & self.written]
        able = [step for step in able if self.is_sure or step.heavy]
        able.sort(key=lambda step: -(seconds[step.operation] or 0.0))
        candidates = {step.operation: step.size for step in able[:_LOOKED_AT]}
        found: dict[Operation, tuple[int, float]] = {}
        at_hand: set[Operation] = set()
        whole = self._seconds(at_hand, seconds)
        while candidates and len(found) < _MOST:
            gains = {name: whole - self._seconds({*at_hand, name}, seconds) for name in candidates}
            best = max(candidates, key=lambda name: gains[name] / candidates[name])
            if gains[best] < _LEAST_S:
                break
            found[best] = candidates.pop(best), gains[best]
            at_hand.add(best)
            whole -= gains[best]
        return found

    def _seconds(self, aside: AbstractSet[Operation], seconds: dict[Operation, float | None]) -> float:
        left_out = self.idle(aside) | aside
        return sum(duration or 0.0 for name, duration in seconds.items() if name not in left_out)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
