"""One call of a block in a forward, and how backward gets the tensors that autograd saved in it.

``torch.utils.checkpoint`` decides before a block runs that it will run again: blocks would have to be measured in a
pass of their own, kept on the device or in RAM for that, and a block that begins to change its buffers would be an
error. Here the decision comes afterwards, when it is known what the block has saved and whether a second run would go
unnoticed. Each saved tensor (`Saved`) is one of:

    tensor is not None    on the device
    away is not None      in RAM, or on its way, or on the device because it is small
    both are None         dropped: backward runs the block again and takes the tensor that it saves then

Dropping is always possible after the block has run, and costs nothing then. So a block that turns out to change a
buffer is not dropped, a block that RAM has no room for is dropped, and no extra pass is needed to find out.

**The second run.** When backward first asks for a dropped tensor, the block is called again with its inputs, under the
conditions of the first call (conditions.py). The tensors that it saves are counted, in the same order as the first
time; those that backward still needs are handed out as it asks for them. When the last of them is there, an exception
ends the run: the rest of the block is not computed. A second run that saves other tensors than the first one is an
error, never a wrong gradient.

**Settled blocks.** Holding the saved tensors until the block has ended, and looking then whether it has changed
anything, takes the host longer than all other work of recomputation. So once earlier passes have shown that a block
repeats, and the plan recomputes it, its tensors are dropped while it runs. A settled block may begin to replace
attributes, buffers or items of containers: the second run finds those of the first, as it does after changes by user
code. If it begins to write to a tensor in place or to compute gradients, backward raises an error. If it begins to draw
random numbers from numpy, the second run draws them again, and backward raises an error where it cannot repeat them.
Writes to its result by user code are no error: gradients are those of the forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ....core.errors import StaleGraph
from ...bridge.torch_private import (
    VersionProbe,
    at_end_of_backward,
    has_plain_storage,
    in_backward,
    never_traced,
    sequence_number,
)
from ..offloading.offloaded import Held, Note, stale
from ..offloading.stream import ActivationStream
from .blocks import replaced, tensors_in
from .conditions import Conditions
from .samples import RESULTS, SAVED, differ, sample_of


class Saved:
    """The object that autograd keeps for a tensor saved by a block; see the table above. Not made of `Held`: there are
    dozens in a block, and one object takes less time than two."""

    __slots__ = (
        "__weakref__", "address", "away", "dtype", "number", "probe", "run", "sample", "shape", "tensor", "version"
    )  # fmt: skip

    def __init__(self, run: BlockRun, number: int, tensor: torch.Tensor, address: int) -> None:
        self.run, self.number, self.address = run, number, address
        # A nested tensor may have no shape: the number of its tensors.
        self.shape = torch.Size([tensor.size(0)]) if tensor.is_nested else tensor.shape
        self.dtype = tensor.dtype
        self.tensor: torch.Tensor | None = None  # without its graph (`Held`)
        self.version: int | None = None
        self.away: Held | Note | None = None
        self.probe: VersionProbe | None = None  # of a dropped tensor that user code may still write to
        self.sample: torch.Tensor | None = None  # some of its values, to compare with those of the second run

    @property
    def changed(self) -> bool:
        """Whether it is on the device, and was written to after it was saved."""
        return self.version is not None and self.tensor is not None and self.tensor._version != self.version


class _Enough(BaseException):
    """Ends a second run: all tensors that backward needs have been saved. No ``except Exception`` of a block may keep
    it."""


class BlockRun:
    """A call of a block. Lives as long as autograd keeps one of its saved tensors."""

    def __init__(
        self,
        block: nn.Module,
        kind: Any,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        conditions: Conditions | None,
        *,
        stream: ActivationStream,
        sends: bool,
        settled: bool,
        compares: int,
        is_certain: Callable[[torch.Tensor], bool],
        unpack: Callable[[Any], torch.Tensor],
    ) -> None:
        """``conditions``: None if ``drop`` may not be called. ``sends``: whether saved tensors are offloaded at once.
        ``compares``: how many of the tensors that it saves last are compared with those of the second run.
        ``is_certain`` is given whether they differ, as a tensor; True: act on it now. ``unpack``: the hook of the
        pass."""
        self._block, self.kind, self._original, self._stream = block, kind, original, stream
        around = stream.around
        self._is_streamed, self._note_of, self._weights = around.is_streamed, around.note_of, around.weights
        self._sends, self.is_settled, self._compares, self._is_certain = sends, settled, compares, is_certain
        self._names, self._conditions, self._unpack = list(kwargs), conditions, unpack
        self._given: tuple[Any, ...] = args, tuple(kwargs.values())  # after `drop`, tensors in the form of `_Input`
        watched = tensors_in(self._given) if conditions is not None else ()
        self._versions = [(weakref.ref(t), t._version) for t in watched if not t.is_inference()]
        self._saved: list[weakref.ref[Saved]] = []
        self._outputs: list[tuple[int, int]] = []  # the memory of each: its first and last address
        self._results: list[torch.Tensor | None] = []  # samples of what the block has returned
        # By number: made by a second run, not asked for yet; with their versions, unless they have none.
        self._again: dict[int, tuple[torch.Tensor, int | None]] = {}
        self.repeats = settled  # whether a second run would give the same
        self.inputs_away = False  # whether `drop` offloads its inputs
        self._refusal = ""  # why there can be no second run, if that is known
        self._has_ended = self._is_asked_early = False  # it has returned; autograd wanted a tensor before that

    # --- forward

    @never_traced
    def pack(self, tensor: torch.Tensor) -> Any:
        """Hook for autograd: save ``tensor``. Of a streamed weight, which `weights` finds again, only a note."""
        low, high = self._weights.span
        try:
            address = tensor.data_ptr()
        except (RuntimeError, NotImplementedError):
            address = -1  # it has no memory of its own
        if low <= address < high and (note := self._note_of(tensor)) is not None:
            return note
        saved = Saved(self, len(self._saved), tensor, address)
        if self._sends:
            saved.away = self._stream.pack(tensor)
        elif not self.is_settled:
            saved.tensor = tensor.detach()
            saved.version = None if tensor.is_inference() else tensor._version
        self._saved.append(weakref.ref(saved))
        return saved

    def end(self, result: Any, *, look_inside: bool) -> bool:
        """Note that the block has run and returned ``result``. Returns whether it may run again in later passes.
        ``look_inside``: see contents.py."""
        self._has_ended, conditions = True, self._conditions
        if self.is_settled:
            return self._end_settled()
        self.repeats = (
            conditions is not None
            and not self._is_asked_early  # it computes gradients, and would again
            and self.has_its_inputs()
            and conditions.contents.unchanged(look_inside=look_inside)
            and not conditions.has_drawn()
        )
        tensors = _tensors_in(result)
        if self._compares and self.repeats:
            self._results = [sample_of(tensor) for tensor in tensors]
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._outputs = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
        return self.repeats

    def _end_settled(self) -> bool:
        assert self._conditions is not None
        if self._conditions.contents.written() or self._inputs_changed():
            self._refusal = "it wrote to one of its tensors or arguments in place, for the first time"
        return not (self._refusal or self._conditions.has_drawn())

    def has_its_inputs(self) -> bool:
        """Whether the block's arguments, buffers and other tensors are unchanged since the call."""
        return self._conditions is not None and not (self._conditions.contents.written_to() or self._inputs_changed())

    def _inputs_changed(self) -> bool:
        return any((tensor := reference()) is not None and tensor._version != at for reference, at in self._versions)

    def _alive(self) -> list[Saved]:
        """The saved tensors that autograd still keeps."""
        return [saved for reference in self._saved if (saved := reference()) is not None]

    def saved_bytes(self) -> int:
        """Bytes of all saved tensors, each storage once, without weights that are permanently on the device."""
        sizes: dict[Any, int] = {}
        for saved in self._alive():
            if isinstance(saved.away, Note):
                sizes[saved.away.offloaded] = saved.away.offloaded.size
                continue
            tensor = saved.tensor if saved.away is None else saved.away.tensor
            if tensor is not None and has_plain_storage(tensor) and not self._stream.is_weight(tensor):
                storage = tensor.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
        return sum(sizes.values())

    def drop(self) -> None:
        """Release the saved tensors; backward will run the block again. Its inputs remain, or are offloaded."""
        if self._compares:
            self._take_samples()
        for saved in () if self.is_settled else self._alive():
            tensor = saved.tensor
            if tensor is None and isinstance(saved.away, Held):
                tensor, saved.version, saved.away = saved.away.tensor, saved.away.version, None
                saved.tensor = tensor
            if tensor is not None:
                if saved.changed:
                    continue  # overwritten since: backward must raise
                if any(first <= saved.address < end for first, end in self._outputs):
                    saved.probe = VersionProbe(tensor)
            saved.tensor = saved.away = None
        away, stream = self.inputs_away, self._stream
        self._given = replaced(self._given, torch.Tensor, lambda tensor: _Input(tensor, stream, away))

    def _take_samples(self) -> None:
        left = self._compares
        for saved in reversed(self._alive()):
            if saved.tensor is None or saved.changed or not has_plain_storage(saved.tensor):
                continue
            saved.sample = None if self._stream.is_weight(saved.tensor) else sample_of(saved.tensor)
            left -= saved.sample is not None
            if not left:
                return

    def stay(self) -> None:
        """Drop nothing: release what a second run would need."""
        self._given, self._versions, self._conditions = (), [], None

    def send(self) -> None:
        """The same, but offload saved tensors that are on the device, as far as there is room."""
        self.stay()
        for saved in self._alive():
            if saved.tensor is not None and not saved.changed:
                saved.away, saved.tensor = self._stream.pack(saved.tensor, made=True), None

    # --- backward

    @never_traced
    def unpack(self, saved: Any) -> torch.Tensor:
        """Hook for autograd: the tensor for which `pack` has returned ``saved``."""
        made = None
        if type(saved) is Saved and saved.sample is None and saved.probe is None:
            made = self._again.pop(saved.number, None)
        if made is None:
            self._is_asked_early |= not self._has_ended
            return self._unpack(saved)
        tensor, version = made
        if version is not None and tensor._version != version:
            raise stale(saved.shape, saved.dtype)
        return tensor

    def get(self, saved: Saved) -> torch.Tensor:
        """The saved tensor, for autograd."""
        if saved.tensor is not None:
            if saved.changed:
                raise stale(saved.shape, saved.dtype)
            return saved.tensor
        if saved.away is not None:
            return self._stream.unpack(saved.away)
        if saved.probe is not None and saved.probe.changed:
            raise stale(saved.shape, saved.dtype)
        if saved.number not in self._again:
            if torch.is_inference_mode_enabled():  # user code calls backward inside of it
                with torch.inference_mode(False):
                    self._run_again()
            else:
                self._run_again()
        made, version = self._again.pop(saved.number)
        if version is not None and made._version != version:
            raise stale(saved.shape, saved.dtype)
        if not in_backward():
            self._again.clear()
        if saved.sample is None:
            return made
        if self._is_certain(differ(saved.sample, sample_of(made), SAVED)) and self._returns_others():
            raise self._other(
                f"tensor {saved.number} that it saves has other values than in forward. Its modules use something that "
                "changes from call to call, where STORM does not find it"
            )
        return made

    def _returns_others(self) -> bool:
        """Run the block once more, to its end, and compare what it returns. A tensor that it saves may differ without
        effect: torch saves memory that it has not filled, and never reads it. True if nothing can be compared."""
        assert self._conditions is not None
        for saved in self._alive():
            saved.sample = None  # one answer is enough
        args, kwargs = self._arguments()
        with self._conditions.again(), torch.no_grad():
            result = self._original(*args, **kwargs)
            samples = [sample_of(tensor) for tensor in _tensors_in(result)]
        if len(samples) != len(self._results) or all(sample is None for sample in samples):
            return True
        pairs = zip(self._results, samples, strict=True)
        return any(
            bool(differ(first, second, RESULTS)) if first is not None else second is not None for first, second in pairs
        )

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call, without their graphs."""
        args, values = replaced(self._given, _Input, _Input.get)
        return args, dict(zip(self._names, values, strict=True))

    def _run_again(self) -> None:
        assert self._conditions is not None
        if not self._has_ended:  # and is settled: else no tensor is dropped yet
            raise self._other("it computed gradients in its forward, for the first time")
        if self._refusal:
            raise self._other(self._refusal)
        if self._conditions.contents.written_to():
            raise self._other("one of its parameters, buffers or other tensors was written to since its forward")
        if self._conditions.is_hooked():
            raise self._other("a hook was registered on one of its modules since its forward")
        wanted = {s.number: s for s in self._alive() if s.tensor is None and s.away is None}
        last, count, has_all, unmade = max(wanted), 0, False, -1

        @never_traced
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal count, has_all, unmade
            if has_all:
                raise _Enough
            low, high = self._weights.span
            try:
                address = tensor.data_ptr()
            except (RuntimeError, NotImplementedError):
                address = -1  # it has no memory of its own
            if low <= address < high and self._is_streamed(tensor):
                return tensor.detach()
            number, count = count, count + 1
            saved = wanted.get(number)
            if saved is not None:
                shape = torch.Size([tensor.size(0)]) if tensor.is_nested else tensor.shape
                if saved.shape != shape or saved.dtype != tensor.dtype:
                    raise self._other(
                        f"tensor {number} that it saves is {tuple(shape)}, {tensor.dtype}; in forward it was "
                        f"{tuple(saved.shape)}, {saved.dtype}"
                    )
                made = tensor.detach()
                self._again[number] = made, None if tensor.is_inference() else tensor._version
            if not tensor.requires_grad:
                # The operation may still be about to write it, as ``rrelu`` does with its noise.
                unmade = sequence_number()
            if number == last:
                if unmade != sequence_number():
                    raise _Enough
                has_all = True  # once that operation has run
            return tensor.detach() if saved is None else made

        if in_backward():
            at_end_of_backward(self._again.clear)  # tensors that backward has not asked for by its end are not needed
        args, names = self._arguments()

        # The graph of this run is never used, but a block that computes gradients itself needs its tensors.
        with saved_tensors_hooks(pack, lambda tensor: tensor), self._conditions.again():
            try:
                self._original(*args, **names)
            except _Enough:
                has_all = True
        if not has_all:
            raise self._other(f"it saves {count} tensors; in forward there were {last + 1} or more")

    def _other(self, what: str) -> StaleGraph:
        self._again.clear()
        return StaleGraph(
            f"Cannot recompute a {type(self._block).__name__}: {what}. It must run the same way both times. Change it, "
            'or set activations="offload".'
        )


def _tensors_in(result: Any) -> list[torch.Tensor]:
    """The tensors that a block has returned, those with plain storage."""
    return [leaf for leaf in tensors_in(result) if has_plain_storage(leaf)]


class _Input:
    """A tensor argument of a block, until the block runs again."""

    __slots__ = ("_stream", "_trained", "_value")

    def __init__(self, tensor: torch.Tensor, stream: ActivationStream, away: bool) -> None:
        # A tensor without a graph is mostly alive anyway: the batch, masks, tables of positions.
        self._stream, self._trained, away = stream, tensor.requires_grad, away and tensor.grad_fn is not None
        self._value: Held | Note = stream.pack(tensor, made=True) if away else Held(tensor)

    def get(self) -> torch.Tensor:
        """The tensor without its graph."""
        value = self._value.get() if type(self._value) is Held else self._stream.unpack(self._value)
        return value.detach().requires_grad_(self._trained) if self._trained else value.detach()
