"""How each block's activations survive until backward: kept, offloaded, or recomputed.

Blocks are wrapped as the user's own ``torch.utils.checkpoint`` around them would wrap them, and only while a pass of
the model runs under our saved-tensor hooks. The first two passes measure, the second because the first is cold: one
block of each kind runs plainly, with its operations timed; the others are kept as long as there seems to be room for
all, else recomputed. What was learned makes the plan (activation_plan.py) for the passes that follow. A pass with
larger inputs is measured anew.

A block is never run twice where that would show: where it changes its buffers, as batch norm does, or where forward
hooks are listening."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..core.tags import Tag
from ..memory.lanes import Lanes
from ..memory.ledger import Ledger
from ..memory.page_lock import PageLock
from ..memory.peak_meter import PeakMeter
from ..memory.pool import HostPool
from ..memory.stopwatch import Reading, timed
from ..memory.wait_meter import WaitMeter
from .activation_plan import KEEP, OFFLOAD, ActivationPlan, BlockPlan, BlockProfile, Means, choose, leanest, recompute
from .activations import SMALL_BYTES, ActivationStream
from .blocks import (
    filled,
    identities_of,
    in_manner,
    is_compiled,
    is_listened_to,
    is_plain,
    leaves_of,
    manner_of,
    shape_of,
    state_of,
    tensors_in,
)
from .held import Held
from .partition import blocks_of
from .placement import headroom
from .replay import Measuring, Recording, Replaying
from .settings import Trial
from .torch_private import has_plain_storage, in_backward, in_functorch, innermost_hooks

_WINDOW = 16  # a part of so many of the budget is on its way out, and as much on its way in
_ROUNDS = 2
_REPLAN_AT = (4, 6, 10)  # passes after which the peak is looked at again


@dataclass(eq=False)
class _Measurement:
    """A block that is being measured: what will be its profile."""

    input_bytes: int
    seconds: Reading = lambda: None
    operations: dict[Any, tuple[int, Reading]] = field(default_factory=dict)
    storages: dict[int, int] = field(default_factory=dict)  # saved by autograd: bytes by address
    repeatable: bool = True

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage.nbytes()

    @property
    def saved_bytes(self) -> int:
        return sum(self.storages.values())

    def profile(self) -> BlockProfile | None:
        """None while the device has not finished."""
        seconds = self.seconds()
        operations = {name: (size, reading()) for name, (size, reading) in self.operations.items()}
        if seconds is None or any(duration is None for _, duration in operations.values()):
            return None
        return BlockProfile(
            forward_s=seconds,
            input_bytes=self.input_bytes,
            saved_bytes=self.saved_bytes,
            operations={name: (size, duration or 0.0) for name, (size, duration) in operations.items()},
            repeatable=self.repeatable,
        )


class BlockCall:
    """Stands in for a block's ``_call_impl``. A copy or pickle of the block gets the ordinary method instead."""

    def __init__(self, saving: Saving, module: nn.Module, index: int, original: Callable[..., Any]) -> None:
        self._saving, self._module = weakref.ref(saving), weakref.ref(module)
        self._index, self._original = index, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        saving, module = self._saving(), self._module()
        if saving is None or module is None or not saving.rules_here():
            return self._original(*args, **kwargs)
        return saving.call(self._index, module, self._original, args, kwargs)

    def belongs_to(self, saving: Saving) -> bool:
        return self._saving() is saving

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(nn.Module._call_impl, memo[id(self._module())])

    def __reduce__(self) -> Any:
        return getattr, (self._module(), "_call_impl")  # of the class: the instance's is being made


class Saving:
    """Decides for a model's blocks, pass by pass, and carries it out."""

    def __init__(
        self,
        blocks: list[nn.Module],
        *,
        mode: str,
        stream: ActivationStream,
        device: torch.device,
        room: Callable[[], int],
        means: Callable[[int], Means | None],
        can_recompute: Callable[[nn.Module], bool],
    ) -> None:
        """``room``: bytes of VRAM that are free of the budget just now. ``means``: what there is to use, given how much
        the present plan keeps; None while that is unknown. ``can_recompute``: whether a block's weights may be on the
        device all at once, as they are when it is recomputed."""
        self.mode, self._stream, self._device, self._room, self._means = mode, stream, device, room, means
        self._can_recompute = can_recompute
        self._blocks = [weakref.ref(block) for block in blocks]
        self._shapes = [shape_of(block) for block in blocks]
        self._own = [identities_of(block) for block in blocks]
        self._calls: list[tuple[nn.Module, str, Any]] = []
        self._sequence: list[Any] = []  # the kinds of the blocks called in this pass
        self._last_sequence: list[Any] = []
        self._planned: list[Any] = []  # the kinds that the plan is for
        self._closed = False
        self._hooks: Callable[[torch.Tensor], Any] | None = None  # the pack hook of the pass that runs
        self._sending = False
        self._measuring: _Measurement | None = None
        self._measured: dict[Any, _Measurement] = {}  # by kind of block
        self._profiles: dict[Any, BlockProfile] = {}
        self._rounds: dict[Any, list[int]] = {}  # the passes in which a kind was measured
        self._kept_bytes = 0  # in this pass, if there is no plan
        self.passes = 0
        self.plan: ActivationPlan | None = None

    # --- passes

    @contextlib.contextmanager
    def passing(self, pack: Callable[[torch.Tensor], Any]) -> Iterator[None]:
        """A pass of the model, under saved-tensor hooks of which ``pack`` is one and which come here."""
        self._stream.begin_pass()
        self.passes += 1
        if self._sequence:
            self._last_sequence = self._sequence
        self._look_back()
        self._kept_bytes, self._sequence = 0, []
        self._hooks, self._sending = pack, self.mode == "offload"
        try:
            yield
        finally:
            self._hooks, self._sending, self._measuring = None, False, None

    def rules_here(self) -> bool:
        """Whether blocks called now are ours to arrange: in a pass, and in nobody else's checkpoint inside of it."""
        if self._hooks is None or self._closed or self.mode in ("keep", "offload"):
            return False
        if in_backward() or in_functorch() or not torch.is_grad_enabled():
            return False
        hooks = innermost_hooks()
        return hooks is not None and hooks[0] == self._hooks

    def pack(self, tensor: torch.Tensor) -> Any:
        """For autograd's hooks: ``tensor``, or a note if it leaves."""
        if self._measuring is not None and has_plain_storage(tensor) and not self._stream.is_weight(tensor):
            self._measuring.see(tensor)
        return self._stream.pack(tensor) if self._sending else Held(tensor)

    def unpack(self, saved: Any) -> torch.Tensor:
        return self._stream.unpack(saved)

    @property
    def reason(self) -> str:
        if self.mode in ("keep", "offload"):
            return f"activations={self.mode!r}"
        if self.plan is not None:
            return self.plan.reason
        return "not measured yet" if self.passes < 2 or self._profiles else "kept: no blocks were found to arrange"

    def _look_back(self) -> None:
        """Make the plan from what has been measured, or make it anew from a peak that is known better now."""
        if self.mode not in ("auto", "recompute") or (self.plan is not None and self.passes not in _REPLAN_AT):
            return
        for kind, measurement in list(self._measured.items()):
            profile = measurement.profile()
            if profile is not None:
                self._profiles[kind] = profile
                del self._measured[kind]
        kinds = self._last_sequence
        if not kinds or any(len(self._rounds.get(kind, ())) < _ROUNDS for kind in kinds):
            return
        if any(kind in self._measured or kind not in self._profiles for kind in kinds):
            return  # the device is still at it
        means = self._means(self.plan.kept_bytes if self.plan is not None else self._kept_bytes)
        if means is not None:
            self._planned = kinds
            self.plan = (choose if self.mode == "auto" else recompute)([self._profiles[kind] for kind in kinds], means)

    # --- blocks

    def attach(self) -> None:
        """Wrap the calls of the blocks; what others have wrapped stays inside."""
        for index, reference in enumerate(self._blocks):
            block = reference()
            assert block is not None
            for name in ("_call_impl", "_compiled_call_impl"):
                original = getattr(block, name)
                if original is not None:
                    self._calls.append((block, name, vars(block).get(name)))
                    block.__dict__[name] = BlockCall(self, block, index, original)

    def detach(self) -> None:
        """Undo ``attach``. Safe to call twice."""
        self._closed = True
        while self._calls:
            block, name, had = self._calls.pop()
            ours = block.__dict__.get(name)
            if not isinstance(ours, BlockCall) or not ours.belongs_to(self):
                continue  # somebody has put something over ours, which does nothing any more
            if had is None:
                block.__dict__.pop(name, None)
            else:
                block.__dict__[name] = had

    def call(
        self, index: int, block: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a block as the plan says."""
        leaves = tensors_in(args, kwargs)
        kind = (self._shapes[index], manner_of(block), tuple(leaf.requires_grad for leaf in leaves))
        size = sum(leaf.nbytes for leaf in leaves if has_plain_storage(leaf))
        self._forget_if_larger(kind, size)
        position = len(self._sequence)
        self._sequence.append(kind)
        rounds = self._rounds.setdefault(kind, [])
        if len(rounds) < _ROUNDS and self.passes not in rounds:
            return self._measure(kind, size, block, original, args, kwargs)
        if self.plan is not None and self._planned[position : position + 1] == [kind]:
            plan = self.plan.blocks[position]
        else:
            plan = self._provisional(position, kind)
        if plan.kind == "recompute" and not (
            identities_of(block) == self._own[index]  # not functional_call's, which will be gone
            and self._may_run_again(block, args, kwargs)
        ):
            plan = OFFLOAD
        if plan.kind == "recompute":
            with self._set(sending=plan.inputs_away):
                return self._recomputed(plan, block, original, args, kwargs)
        with self._set(sending=plan.kind == "offload"):
            return original(*args, **kwargs)

    def _may_run_again(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return not is_listened_to(block) and is_plain((*args, *kwargs.values())) and self._can_recompute(block)

    def _forget_if_larger(self, kind: Any, size: int) -> None:
        """What was learned from smaller inputs does not hold."""
        known = self._profiles.get(kind) or self._measured.get(kind)
        if known is not None and size > known.input_bytes:
            for table in (self._profiles, self._measured, self._rounds):
                table.pop(kind, None)
            self.plan = None

    def _provisional(self, position: int, kind: Any) -> BlockPlan:
        """Before there is a plan: keep, as long as there seems to be room for all that follows."""
        known = self._measured.get(kind) or self._profiles[kind]
        count = len(self._last_sequence) or len(self._blocks)
        ahead = max(1, count - position) + 1  # and one to compute with
        if position == count - 1:
            return KEEP
        if self.mode == "auto" and known.saved_bytes * ahead <= self._room():
            self._kept_bytes += known.saved_bytes
            return KEEP
        return OFFLOAD if not known.repeatable else leanest(self._profiles.get(kind))

    def _measure(
        self, kind: Any, size: int, block: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run the block plainly and see what it does."""
        measurement = self._measuring = _Measurement(size)
        before = state_of(block, args, kwargs)
        timing = Measuring(lambda call: timed(self._device, call))
        mode: AbstractContextManager[Any] = contextlib.nullcontext() if is_compiled(block) else timing
        try:
            with self._set(sending=False), mode:
                result, measurement.seconds = timed(self._device, lambda: original(*args, **kwargs))
        finally:
            self._measuring = None
        measurement.operations = timing.found
        still = state_of(block, args, kwargs) == before
        measurement.repeatable = still and self._may_run_again(block, args, kwargs)
        self._kept_bytes += measurement.saved_bytes
        self._measured[kind] = measurement
        self._rounds[kind].append(self.passes)
        return result

    def _recomputed(
        self, plan: BlockPlan, block: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        leaves = leaves_of((*args, *kwargs.values()))
        form = filled((*args, *kwargs.values()), iter([None] * len(leaves)))  # tensors must not stay in there
        count, names, manner = len(args), list(kwargs), manner_of(block)

        def run(*given: Any) -> Any:
            values = filled(form, iter(given))
            with in_manner(block, manner):  # backward may come after eval()
                return original(*values[:count], **dict(zip(names, values[count:], strict=True)))

        if plan.results_away and not is_compiled(block):
            recording = Recording(plan.results_away, self._stream)
            contexts = (recording, Replaying(recording, self._stream))
            return checkpoint(run, *leaves, use_reentrant=False, context_fn=lambda: contexts)
        return checkpoint(run, *leaves, use_reentrant=False)

    @contextlib.contextmanager
    def _set(self, *, sending: bool) -> Iterator[None]:
        before, self._sending = self._sending, sending
        try:
            yield
        finally:
            self._sending = before


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What activations find around them: the lanes that carry them, the books that they are charged to."""

    device: torch.device
    lanes: Lanes
    ledger: Ledger
    page_lock: PageLock | None
    waits: WaitMeter
    lock: threading.RLock
    rates: Callable[[], tuple[float, float]]  # bytes per second that the link has free, out and in; 0: not known
    peak: PeakMeter
    limit_bytes: int  # of the device
    foreign_bytes: int = 0  # what this process has there that is not part of that
    can_recompute: Callable[[nn.Module], bool] = lambda _block: True


def open_saving(
    model: nn.Module | None,
    mode: str,
    around: Surroundings,
    weights: Callable[[], Iterable[torch.Tensor]],
    trial: Trial,
) -> tuple[Saving, Callable[[], None]]:
    """Arrange the activations of ``model`` by ``mode``; also what ends it, once the lanes are empty.

    ``weights``: parameters and buffers that are on the device for good."""
    device, limit = around.device, around.limit_bytes
    slabs = HostPool(
        ledger=around.ledger,
        tag=Tag.ACTIVATIONS,
        page_lock=around.page_lock,
        pageable=around.lanes.ring is not None,
        poison=around.lanes.store if trial.poison else None,
    )
    stream = ActivationStream(
        lanes=around.lanes,
        slabs=slabs,
        waits=around.waits,
        lock=around.lock,
        weights=weights,
        window_bytes=limit // _WINDOW,
        ahead_bytes=limit // _WINDOW,
        small_bytes=SMALL_BYTES if trial.small_bytes is None else trial.small_bytes,
    )

    def spare(used_bytes: int) -> int:
        if trial.activation_room is not None:
            return trial.activation_room
        return sys.maxsize if device.type != "cuda" else limit - headroom(limit) - used_bytes + around.foreign_bytes

    def means(kept_bytes: int) -> Means | None:
        out_rate, in_rate = around.rates()
        used = around.peak.bytes() - kept_bytes
        return Means(spare_bytes=spare(used), out_bytes_per_s=out_rate, in_bytes_per_s=in_rate)

    def room() -> int:
        return spare(torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)

    blocks = blocks_of(model) if model is not None else []
    saving = Saving(
        blocks,
        mode=mode,
        stream=stream,
        device=device,
        room=room,
        means=means,
        can_recompute=around.can_recompute,
    )
    saving.attach()

    def end() -> None:
        saving.detach()
        stream.close()

    return saving, end
