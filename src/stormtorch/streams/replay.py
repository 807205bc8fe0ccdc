"""Recomputing a block without computing its expensive parts again.

While a block runs forward under `Recording`, the results of chosen operations, matrix products and attention, are kept
or sent to RAM. When checkpointing runs the block again in backward, `Replaying` hands those results out instead of
computing them; everything cheap in between is computed anew. An operation is known by its name and by how often that
name has come up, which is the same in both runs.

A result that something is done to in place afterwards is not put aside after all. What is missing is simply computed:
every choice gives the same numbers."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from .activations import ActivationStream, Note
from .torch_private import StorageReference, VersionProbe, has_plain_storage

Operation = tuple[str, int]
"""An operation of a block: its name, and how many of that name came before it."""


@functools.cache
def _kind_of(func: Any) -> str:
    """ "cheap", "writes", "expensive", or "random": expensive unless it takes random numbers.

    Asked for every operation of a block, so the answer is remembered: it costs more than many an operation does."""
    if isinstance(func, HigherOrderOperator):
        return "cheap"
    packet = func.overloadpacket
    name = packet.__name__
    if func._schema.is_mutable:
        return "writes"
    if "backward" in name or not (packet in flop_registry or name.startswith("_scaled_dot_product")):
        return "cheap"
    if any(returned.alias_info is not None for returned in func._schema.returns):
        return "cheap"
    return "random" if torch.Tag.nondeterministic_seeded in func.tags else "expensive"


def is_expensive(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether its result is worth having, and can be handed out as if it had just been computed."""
    kind = _kind_of(func)
    return kind == "expensive" or (kind == "random" and not _drops_out(func, args, kwargs))


def _drops_out(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether it takes random numbers: those that follow would be others if it were left out."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


class Numbering:
    """Counts the expensive operations of one run."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def next(self, func: Any) -> Operation:
        name = str(func)
        self._seen[name] += 1
        return name, self._seen[name] - 1


class Kept:
    """A result that stays on the device."""

    __slots__ = ("probe", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.probe = tensor.detach(), None if tensor.is_inference() else VersionProbe(tensor)


class Recording(TorchDispatchMode):
    """Puts results aside: ``away`` says for an operation whether they are sent to RAM (True) or kept (False)."""

    supports_higher_order_operators = True

    def __init__(self, away: Mapping[Operation, bool], stream: ActivationStream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._away, self._stream = away, stream
        self._numbers = Numbering()
        self._storages: dict[int, tuple[StorageReference, Operation]] = {}  # of the results
        self.results: dict[Operation, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _kind_of(func) == "writes":
            self._spoil(func, args, kwargs)
        elif is_expensive(func, args, kwargs):
            operation = self._numbers.next(func)
            away = self._away.get(operation)
            if away is not None and all(map(has_plain_storage, _tensors(result))):
                self.results[operation] = tree_map(self._sent if away else _kept, result)
                for leaf in tree_leaves(result):
                    if isinstance(leaf, torch.Tensor) and has_plain_storage(leaf):
                        reference = StorageReference(leaf.untyped_storage())
                        self._storages[reference.key] = (reference, operation)
        return result

    def _spoil(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Forget results that have been written over. Versions would not tell: a storage may be cut by hand."""
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[number] if number < len(args) else kwargs.get(argument.name)
                for leaf in tree_leaves(written):
                    if isinstance(leaf, torch.Tensor) and has_plain_storage(leaf):
                        known = self._storages.pop(leaf.untyped_storage()._cdata, None)
                        if known is not None:
                            self.results.pop(known[1], None)

    def _sent(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        packed = self._stream.pack(value)
        return packed if isinstance(packed, Note) else Kept(value)


class Replaying(TorchDispatchMode):
    """Hands out what ``recording`` has put aside."""

    supports_higher_order_operators = True

    def __init__(self, recording: Recording, stream: ActivationStream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results, self._stream = recording.results, stream
        self._numbers = Numbering()

    def __enter__(self) -> Any:
        self._numbers = Numbering()  # a graph that is retained is run again
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_expensive(func, args, kwargs):
            operation = self._numbers.next(func)
            saved = self._results.get(operation)
            if saved is not None and not tree_any(_spoiled, saved):
                if tree_any(_is_kept, saved):  # or it would stay until the whole block is through
                    del self._results[operation]
                return tree_map(self._resolved, saved)
        return func(*args, **kwargs)

    def _resolved(self, value: Any) -> Any:
        if isinstance(value, Note):
            return self._stream.unpack(value)
        return value.tensor.detach() if isinstance(value, Kept) else value


class Measuring(TorchDispatchMode):
    """Runs a block once and notes, for every expensive operation, the bytes of its result and how long it took."""

    supports_higher_order_operators = True

    def __init__(self, time: Callable[[Callable[[], Any]], tuple[Any, Callable[[], float | None]]]) -> None:
        """``time`` runs a call and returns its result, and what will tell the seconds."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._time = time
        self._numbers = Numbering()
        self.found: dict[Operation, tuple[int, Callable[[], float | None]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_expensive(func, args, kwargs):
            return func(*args, **kwargs)
        result, seconds = self._time(lambda: func(*args, **kwargs))
        size = sum(leaf.nbytes for leaf in _tensors(result) if has_plain_storage(leaf))
        self.found[self._numbers.next(func)] = (size, seconds)
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _kept(value: Any) -> Any:
    return Kept(value) if isinstance(value, torch.Tensor) else value


def _is_kept(value: Any) -> bool:
    return isinstance(value, Kept)


def _spoiled(value: Any) -> bool:
    return isinstance(value, (Note, Kept)) and value.probe is not None and value.probe.changed
