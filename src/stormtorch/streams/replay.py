"""Recomputing a block without computing all of it again.

While a block runs forward under `Recording`, the results of chosen operations are kept or sent to RAM. When
checkpointing runs the block again in backward, `Replaying` hands those results out instead of computing them, and what
is then idle (tape.py) is not computed either: memory without a meaning stands in for its results, which only other idle
operations look at. An operation is known by its name and by how often that name has come up, which is the same in both
runs. If the block runs forward otherwise than when the tape was made, all of it is computed again; if with the same
operations, but on other operands, nothing counts as idle. If it runs otherwise in backward than in forward, everything
is computed from there on, and if it is too late for that, it is an error.

A result that something is done to in place afterwards is not put aside after all. What is missing is simply computed:
every choice gives the same numbers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from ..core.errors import StaleGraph
from ..memory.stopwatch import Reading
from .activations import ActivationStream, Note
from .tape import Numbering, Operation, Storages, Tape, numbered_anew
from .torch_private import StorageReference, VersionProbe, has_plain_storage
from .unheard import is_our_own

_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")


_LOOKS = frozenset(getattr(torch.Tensor, name) for name in ("numpy", "tolist", "data_ptr", "__array__", "__dlpack__"))


@functools.cache
def _kind_of(func: Any) -> str:
    """One of: "writes" into its arguments; "fixed", must run; "random", must if it takes random numbers; "view",
    computes nothing, and comes and goes with who is looking on; "empty", memory that is yet to be filled; "plain".

    Asked for every operation of a block, so the answer is remembered: it costs more than many an operation does."""
    if isinstance(func, HigherOrderOperator):
        return "fixed"
    if func._schema.is_mutable:
        return "writes"
    if any(returned.alias_info is not None for returned in func._schema.returns):
        return "view"
    if func.overloadpacket.__name__ in _EMPTY:
        return "empty"
    return "random" if torch.Tag.nondeterministic_seeded in func.tags else "plain"


@functools.cache
def _is_heavy(func: Any) -> bool:
    """Whether it is a matrix product, a convolution, attention."""
    packet = func.overloadpacket
    return packet in flop_registry or packet.__name__.startswith("_scaled_dot_product")


def _drops_out(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether it takes random numbers: those that follow would be others if it were left out."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


@dataclass(frozen=True)
class _Form:
    """What a tensor looks like."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self, *, poison: bool) -> torch.Tensor:
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return tensor.fill_(float("nan")) if poison and tensor.is_floating_point() else tensor


class Kept:
    """A result that stays on the device."""

    __slots__ = ("probe", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.probe = tensor.detach(), None if tensor.is_inference() else VersionProbe(tensor)


class Recording(TorchDispatchMode):
    """Puts results aside: ``away`` says for an operation whether they are sent to RAM (True) or kept (False)."""

    supports_higher_order_operators = True

    def __init__(self, away: Mapping[Operation, bool], stream: ActivationStream, tape: Tape, module: nn.Module) -> None:
        """``module`` runs, and another of its kind may have when ``tape`` was made."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._away, self._stream, self._tape, self._module = away, stream, tape, module
        self._idle = tape.idle(away.keys())
        self._numbers = self.numbering()
        self._passing = Storages() if self._idle and module not in tape.alike else None
        self._flow: list[tuple[int, ...]] = []
        self._drops_out = False
        self.run: list[Operation] = []  # all operations, or where they may differ from run to run the heavy ones
        self._storages: dict[int, tuple[StorageReference, Operation]] = {}  # of the results
        self.results: dict[Operation, Any] = {}
        self.forms: dict[
            Operation, Any
        ] = {}  # of the results of idle operations, and of those whose results may be lost

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        kind = _kind_of(func)
        if kind == "view" or is_our_own():
            return result
        operation = self._numbers.next(func)
        if self.follows(func):
            self.run.append(operation)
        if self._passing is not None:
            self._flow.append(self._passing.passing((args, kwargs), result))
        if kind == "writes":
            self._spoil(func, args, kwargs)
        if kind == "random" and (operation in self._away or operation in self._idle) and _drops_out(func, args, kwargs):
            self._drops_out = True  # it did not when the tape was made
        if operation in self._away or operation in self._idle:
            self.forms[operation] = tree_map(_form_of, result)
        if operation in self._away and kind != "writes" and all(map(has_plain_storage, _tensors(result))):
            self.results[operation] = tree_map(self._sent if self._away[operation] else _kept, result)
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and has_plain_storage(leaf):
                    reference = StorageReference(leaf.untyped_storage())
                    self._storages[reference.key] = (reference, operation)
        return result

    def __exit__(self, *about: object) -> None:
        super().__exit__(*about)  # type: ignore[no-untyped-call]
        if self._passing is not None and self.ran_as_expected:
            self._tape.alike[self._module] = numbered_anew(self._flow) == self._tape.flow
            self._passing = None
            self._flow.clear()

    def follows(self, func: Any) -> bool:
        """Whether that operation comes in every run."""
        return self._tape.is_sure or (not isinstance(func, HigherOrderOperator) and _is_heavy(func))

    @property
    def ran_as_expected(self) -> bool:
        expected = self._tape.operations if self._tape.is_sure else self._tape.heavy
        return self.run == expected and not self._drops_out

    def numbering(self) -> Numbering:
        return Numbering(self._tape.before)

    def idle(self) -> frozenset[Operation]:
        """What need not be computed again, with the results that are there."""
        if not self.ran_as_expected or not self._tape.alike.get(self._module, True):
            return frozenset()
        return self._idle if self.results.keys() == self._away.keys() else self._tape.idle(self.results.keys())

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
        self._recording, self._stream = recording, stream
        self._numbers, self._idle = recording.numbering(), frozenset[Operation]()
        self._position, self._astray, self._committed = 0, False, False
        self._paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs now was not recorded."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __enter__(self) -> Any:
        results = self._recording.results
        if not self._recording.ran_as_expected:
            results.clear()  # a name may be another operation's then
        for operation in [name for name, saved in results.items() if tree_any(_spoiled, saved)]:
            del results[operation]
        # A graph that is retained is run again.
        self._numbers, self._idle = self._recording.numbering(), self._recording.idle()
        self._position, self._astray, self._committed = 0, False, False
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused or _kind_of(func) == "view" or is_our_own():
            return func(*args, **kwargs)
        operation = self._numbers.next(func)
        if self._recording.follows(func):
            self._follow(operation)
        saved = None if self._astray else self._recording.results.get(operation)
        if saved is not None:
            self._committed = True
            if tree_any(_is_kept, saved):  # or it would stay until the whole block is through
                del self._recording.results[operation]
            return tree_map(self._resolved, saved)
        if not self._astray and operation in self._idle:
            self._committed = True
            return tree_map(self._standing_in, self._recording.forms[operation])
        return func(*args, **kwargs)

    def _follow(self, operation: Operation) -> None:
        """Notice when the block goes another way than in forward."""
        expected = self._recording.run[self._position : self._position + 1]
        self._position += 1
        if self._astray or expected == [operation]:
            return
        self._astray = True
        if self._committed:
            raise StaleGraph(
                f"Cannot recompute a block: in backward it ran {operation[0]} where forward ran "
                f"{expected[0][0] if expected else 'nothing any more'}. Make it run alike both times, or set "
                'activations="offload".'
            )

    def _resolved(self, value: Any) -> Any:
        if isinstance(value, Note):
            return self._stream.unpack(value)
        return value.tensor.detach() if isinstance(value, Kept) else value

    def _standing_in(self, value: Any) -> Any:
        return value.empty(poison=self._stream.poison) if isinstance(value, _Form) else value


class Listening(TorchDispatchMode):
    """Notes which operations run, but for those that ``is_foreign`` says are others'."""

    supports_higher_order_operators = True

    def __init__(self, is_foreign: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers, self._is_foreign = Numbering(), is_foreign
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _kind_of(func) != "view" and not (self._is_foreign() or is_our_own()):
            self.names.append(self._numbers.next(func)[0])
        return func(*args, **(kwargs or {}))


class Looking(TorchFunctionMode):
    """Notices when a block looks at values without an operation, and puts that on ``tape``: a second run that has
    nothing there to look at would go another way."""

    def __init__(self, tape: Tape, is_foreign: Callable[[], bool]) -> None:
        super().__init__()
        self._tape, self._is_foreign = tape, is_foreign

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _LOOKS and not (self._is_foreign() or is_our_own()):
            self._tape.read(args[0])
        return func(*args, **(kwargs or {}))


class Measuring(TorchDispatchMode):
    """Runs a block once, and puts every operation on ``tape``."""

    supports_higher_order_operators = True

    def __init__(
        self,
        tape: Tape,
        time: Callable[[Callable[[], Any]], tuple[Any, Reading]],
        is_foreign: Callable[[], bool] = lambda: False,
        is_weight: Callable[[torch.Tensor], bool] = lambda _tensor: False,
    ) -> None:
        """``time`` runs a call and returns its result, and what will tell the seconds. ``is_foreign``: whether what
        runs now is not the block's."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape, self._time, self._is_foreign, self._is_weight = tape, time, is_foreign, is_weight
        self._numbers = Numbering()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = _kind_of(func)
        if kind == "view" or self._is_foreign() or is_our_own():
            return func(*args, **kwargs)
        result, seconds = self._time(lambda: func(*args, **kwargs))
        if kind == "random":
            kind = "fixed" if _drops_out(func, args, kwargs) else "plain"
        if kind == "plain" and _comes_to_the_host(args, result):
            kind = "fixed"  # where anybody may look at it
        if func is torch.ops.aten._to_copy.default and has_plain_storage(args[0]) and self._is_weight(args[0]):
            self._tape.is_sure = False  # autocast does that, or finds it done
        heavy = not isinstance(func, HigherOrderOperator) and _is_heavy(func)
        self._tape.add(self._numbers.next(func), (args, kwargs), result, kind=kind, heavy=heavy, seconds=seconds)
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _comes_to_the_host(args: tuple[Any, ...], result: Any) -> bool:
    return any(leaf.is_cpu for leaf in _tensors(result)) and not all(leaf.is_cpu for leaf in _tensors(args))


def _kept(value: Any) -> Any:
    return Kept(value) if isinstance(value, torch.Tensor) else value


def _form_of(value: Any) -> Any:
    return _Form(value.shape, value.stride(), value.dtype, value.device) if isinstance(value, torch.Tensor) else value


def _is_kept(value: Any) -> bool:
    return isinstance(value, Kept)


def _spoiled(value: Any) -> bool:
    return isinstance(value, (Note, Kept)) and value.probe is not None and value.probe.changed
