"""How each block's activations survive until backward: kept, offloaded, or recomputed.

Blocks are wrapped as the user's own ``torch.utils.checkpoint`` around them would wrap them, and only while a pass of
the model runs under our saved-tensor hooks. The first two passes measure, the second because the first is cold: one
block of each kind runs plainly, with its operations timed; the others are kept as long as there seems to be room for
all, else recomputed. What was learned makes the plan (activation_plan.py) for the passes that follow. A pass with
larger inputs is measured anew.

A block is never run twice where that would show: where it changes its buffers, as batch norm does, or where forward
hooks are listening.

What is saved outside of blocks is *loose* (loose.py). What is saved after the last block stays."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ..core.errors import StormError
from ..core.notices import say_once
from ..memory.stopwatch import timed
from .activation_plan import (
    KEEP,
    OFFLOAD,
    ActivationPlan,
    BlockPlan,
    BlockProfile,
    Means,
    choose,
    cost_s,
    leanest,
    recompute,
)
from .activations import ActivationStream
from .block_call import BlockCall, Call, calling
from .blocks import (
    Untouched,
    attributes_of,
    identities_of,
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
from .knowledge import ROUNDS, Knowledge
from .levels import UNCOUNTED, Levels, Way
from .loose import Loose
from .measurement import Measurement
from .replay import Looking, Measuring
from .rerun import Run, in_parts, recomputed
from .tape import Tape
from .torch_private import (
    at_end_of_backward,
    current_pass,
    has_plain_storage,
    in_backward,
    in_functorch,
    innermost_hooks,
    never_traced,
)

_REPLAN_AT = (4, 8)  # passes after which the peak is looked at again


class Saving:
    """Decides for a model's blocks, pass by pass, and carries it out."""

    def __init__(
        self,
        blocks: list[nn.Module],
        *,
        mode: str,
        stream: ActivationStream,
        device: torch.device,
        levels: Levels,
        room: Callable[[], int],
        is_tight: Callable[[], bool],
        is_filling: Callable[[], bool],
        is_nearly_full: Callable[[], bool],
        over: Callable[[], str],
        has_held: Callable[[], bool],
        means: Callable[[list[Any], list[BlockProfile], list[int]], Means],
        can_recompute: Callable[[nn.Module], bool],
    ) -> None:
        """``room``: bytes of VRAM that are free of the budget just now; ``is_tight``: whether they may run out;
        ``is_filling``, ``is_nearly_full``: see ``Loose``; ``over``: what to say if they have run out in the last pass,
        or nothing; ``has_held``: whether the present plan is known to hold the budget.
        ``means``: what blocks of these kinds have to use, given what each one held in the last pass.
        ``can_recompute``: whether a block's weights may be on the device all at once, as when it is recomputed."""
        self.mode, self._stream, self._device, self._levels = mode, stream, device, levels
        self._room, self._is_tight, self._has_held = room, is_tight, has_held
        self._over = over
        self._means, self._can_recompute = means, can_recompute
        self._way_bytes = stream.ahead_bytes  # what may be on its way while nothing is planned
        self._loose = Loose(stream, is_filling=is_filling, is_nearly_full=is_nearly_full)
        self._noted_task = -1  # the last backward whose end will be noted
        self._blocks = [weakref.ref(block) for block in blocks]
        self._shapes = [shape_of(block) for block in blocks]
        self._own = [identities_of(block) for block in blocks]
        self._buffered = [bool(list(block.buffers())) for block in blocks]
        self._calls: list[tuple[nn.Module, str, Any]] = []
        self._sequence: list[Any] = []  # the kinds of the blocks called in this pass
        self._last_sequence: list[Any] = []
        self._last_of_kind: dict[Any, int] = {}  # in that
        self._planned: list[Any] = []  # the kinds that the plan is for
        self._closed = False
        self._hooks: Callable[[torch.Tensor], Any] | None = None  # the pack hook of the pass that runs
        self._sending = False
        self._in_block = False
        self._is_packing = False  # what runs now sends an activation away, and is not the block's
        self._measuring: Measurement | None = None
        self.known = Knowledge()
        self._given: tuple[Any, Untouched] = (None, Untouched(()))  # what the last block was, and its kind
        self._held: list[int] = []  # bytes that each block of this pass has kept
        self._tight = False  # whether the device may run out
        self._is_past_blocks = False
        self._input_bytes = 0  # of this pass: inputs of blocks that have left before anything was planned
        self.passes = 0
        self._passes_before = 0  # inputs were as large as they are
        self.plan: ActivationPlan | None = None

    # --- passes

    @property
    def _age(self) -> int:
        """The number of this pass, of those with inputs as large as they are."""
        return self.passes - self._passes_before

    @contextlib.contextmanager
    def passing(self, pack: Callable[[torch.Tensor], Any]) -> Iterator[None]:
        """A pass of the model, under saved-tensor hooks of which ``pack`` is one and which come here."""
        self._stream.begin_pass()
        self._levels.begin()
        self.passes += 1
        if self._sequence:
            self._last_sequence = self._sequence
            self._last_of_kind = {kind: position for position, kind in enumerate(self._sequence)}
        self._look_back()
        self._loose.begin_pass()
        self._held, self._sequence, self._input_bytes = [], [], 0
        self._is_past_blocks = False
        self._hooks, self._sending = pack, self.mode == "offload" or self._loose.leaves
        self._set_ways()
        try:
            yield
        finally:
            self._look_at_inputs()
            self._hooks, self._sending, self._measuring = None, False, None
            if self._age <= _REPLAN_AT[-1]:
                ours = self._stream.travelling_bytes() + (0 if self._held else self._loose.kept_bytes)
                self._levels.reach(len(self._held), ours, self._stream.window_bytes)

    def _set_ways(self) -> None:
        """What may be on its way, to begin with. Nothing, as long as nobody knows whether there is room for it."""
        unknown = self.plan is None and (self._age <= ROUNDS or bool(self._last_sequence))
        careful = unknown and self.mode != "offload" and self._room() < UNCOUNTED
        way_bytes = self.plan.way_bytes[-1] if self.plan is not None else 0 if careful else self._loose.way_bytes
        self._stream.window_bytes = self._stream.ahead_bytes = way_bytes
        self._stream.is_strict = self.plan is not None or careful or (self.mode == "auto" and self._loose.leaves)

    def rules_here(self) -> bool:
        """Whether blocks called now are ours to arrange: in a pass, and in nobody else's checkpoint inside of it."""
        if self._hooks is None or self._closed or self.mode in ("keep", "offload"):
            return False
        if in_backward() or in_functorch() or not torch.is_grad_enabled():
            return False
        hooks = innermost_hooks()
        return hooks is not None and hooks[0] == self._hooks

    @never_traced
    def pack(self, tensor: torch.Tensor) -> Any:
        """For autograd's hooks: ``tensor``, or a note if it leaves."""
        measuring = self._measuring
        self._is_packing = True
        try:
            if measuring is not None and has_plain_storage(tensor):
                measuring.see(tensor, is_weight=self._stream.is_weight(tensor))
            is_loose = not self._in_block and not self._is_past_blocks and self.mode == "auto"
            if is_loose:
                self._see_loose(tensor)
            if self._sending:
                packed = self._stream.pack(tensor)
            else:
                packed = self._loose.hold(tensor) if is_loose else Held(tensor)
        finally:
            self._is_packing = False
        return packed

    def _see_loose(self, tensor: torch.Tensor) -> None:
        settled = self._age > _REPLAN_AT[-1]
        self._sending = self._loose.see(tensor, leaving=self._sending, measured=self._age > ROUNDS, settled=settled)
        self._tight = self._tight or self._loose.leaves

    @never_traced
    def unpack(self, saved: Any) -> torch.Tensor:
        self.note_end()
        return self._stream.unpack(saved)

    def note_end(self) -> None:
        """Somebody asks for what was saved: when that backward ends, the level is noted, before users do as they like
        with the peak."""
        task = current_pass() if self._age <= _REPLAN_AT[-1] else -1
        if task not in (-1, self._noted_task):
            self._noted_task = task
            at_end_of_backward(self._levels.end)

    @property
    def reason(self) -> str:
        if self.mode in ("keep", "offload"):
            return f"activations={self.mode!r}"
        if self.plan is not None:
            return self.plan.reason
        if self.passes < 2 or self.known:
            return "not measured yet"
        return self._loose.reason or "kept: no blocks were found to arrange"

    @property
    def wish_bytes(self) -> int:
        """What has left only because it is not known yet whether there is room for it. Of blocks this is what a
        checkpoint around each would keep."""
        if self._last_sequence or self._sequence:
            return self._input_bytes  # of a pass without a plan
        return self._loose.away_bytes if self._age <= ROUNDS else 0

    def _look_back(self) -> None:
        """Make the plan from what has been measured, or make it anew from a peak that is known better now."""
        if self._age == _REPLAN_AT[-1] and (over := self._over()):
            say_once(over, key="over the budget")
        if self.mode not in ("auto", "recompute"):
            return
        self._tight = self._tight or self._is_tight()
        if self._age > ROUNDS and (self.plan is None or self._age in _REPLAN_AT):
            before = self.plan
            self._plan_blocks()
            is_new = self.plan is not before or self._age in (ROUNDS + 1, *_REPLAN_AT)
            if self.mode == "auto" and is_new and self._age <= _REPLAN_AT[-1]:  # later nobody counts what is loose
                self._plan_loose()

    def _plan_blocks(self) -> None:
        kinds = self._last_sequence
        profiles = self.known.profiles_of(kinds)
        if not profiles:
            return
        means = self._means(kinds, profiles, self._held)
        plan = (choose if self.mode == "auto" else recompute)(profiles, means)
        if self.plan is not None and self._planned == kinds and self._has_held():
            plan = min(self.plan, plan, key=lambda made: cost_s(profiles, made, means))  # plans are careful, it held
        if plan is not self.plan:
            self._levels.begin_plan()
        self._planned, self.plan = kinds, plan
        self._stream.stay_bytes = 0  # that was for a pass without blocks

    def _plan_loose(self) -> None:
        is_short = self._loose.leaves or bool(self._over())
        if self.plan is not None:
            self._loose.plan_beside(self.plan, is_short=is_short)
        elif is_short and not self._last_sequence:  # or there are blocks, and the device is still at what they take
            self._loose.plan_alone(lambda stayed: self._means([], [], [stayed]).rooms[-1])
            self._levels.begin_plan()

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

    def call(self, index: int, block: nn.Module, original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block as the plan says."""
        if self._in_block:
            return original(*args, **kwargs)  # it is part of another one
        self._look_at_inputs()
        leaves = tensors_in(args, kwargs)
        kind = (self._shapes[index], manner_of(block), tuple(leaf.requires_grad for leaf in leaves))
        size = sum(leaf.nbytes for leaf in leaves if has_plain_storage(leaf))
        self._forget_if_larger(kind, size)
        position = len(self._sequence)
        self._sequence.append(kind)
        if self._is_to_be_measured(kind, position):
            result, held = self._measure(kind, size, block, original, args, kwargs)
            way: Way = "keep" if held else "other"
        else:
            plan = self._plan_for(position, kind)
            if plan.kind == "recompute" and not (
                identities_of(block) == self._own[index]  # not functional_call's, which will be gone
                and self._may_run_again(block, args, kwargs)
            ):
                plan = OFFLOAD
            known = self.known.planned_with(kind)
            held = plan.held_bytes(
                input_bytes=known.input_bytes,
                saved_bytes=known.saved_bytes,
                operations=known.results(plan.parts) if isinstance(known, BlockProfile) else {},
            )
            way = plan.way(known.parts)
            if self.plan is None and plan.inputs_away:
                self._input_bytes += known.input_bytes
            buffers = Untouched(block.buffers() if self._buffered[index] and plan.kind == "recompute" else ())
            result = self._run(plan, known, block, original, args, kwargs)
            if not buffers:
                self._may_not_run_again(kind)
                raise StormError(
                    f"A {type(block).__name__} has changed its buffers, which it did not when it was measured, and "
                    'would change them again in backward. Set activations="offload".'
                )
        self._given = kind, Untouched(leaves)
        if self._is_last():
            self._sending, self._is_past_blocks = False, True  # what comes now is what backward begins with
        self._held.append(held)
        self._levels.hold(kind, way, held)
        self._watch(position, result)
        return result

    def _is_to_be_measured(self, kind: Any, position: int) -> bool:
        """In the first pass the first block of a kind, since the others depend on what it does; then the last one,
        which is held for the shortest time."""
        measured = self.known.passes_of(kind)
        if len(measured) >= ROUNDS or self.passes in measured:
            return False
        return not measured or position >= self._last_of_kind.get(kind, 0)

    def _plan_for(self, position: int, kind: Any) -> BlockPlan:
        if self.plan is not None and self._planned[position : position + 1] == [kind]:
            return self.plan.blocks[position]
        return self._provisional(position, kind)

    def _is_last(self) -> bool:
        """Whether the block that is being called should be the last one of the pass."""
        return len(self._sequence) == (len(self._last_sequence) or len(self._blocks))

    def _run(
        self,
        plan: BlockPlan,
        known: BlockProfile | Measurement,
        block: nn.Module,
        original: Call,
        args: Any,
        kwargs: Any,
    ) -> Any:
        with self._set(sending=plan.kind == "offload" or plan.inputs_away):
            if plan.kind != "recompute":
                return original(*args, **kwargs)
            run = Run(
                stream=self._stream,
                away=plan.results_away,
                tape=known.tape,
                module=block,
                original=original,
                args=args,
                kwargs=kwargs,
            )
            if not plan.parts:
                return recomputed(run)
            leads = known.leads if isinstance(known, BlockProfile) and plan.led else {}
            return in_parts(
                run,
                parts=plan.parts,
                leads=leads,
                is_ours=self.rules_here,
                is_foreign=lambda: self._is_packing,
            )

    def _watch(self, position: int, result: Any) -> None:
        """Notice when backward comes to the block: when there is a gradient of what it gave."""
        way = self.plan.way_bytes if self.plan is not None else []
        ahead = way[position] if position < len(way) - 1 else 0 if self._stream.is_strict else self._way_bytes
        noting, this, number = self._age <= _REPLAN_AT[-1], weakref.ref(self), self.passes

        def reached(_gradient: torch.Tensor) -> None:
            saving = this()
            if saving is None:
                return
            if noting and saving.passes == number:
                saving._levels.reach(position, saving._stream.travelling_bytes(), ahead)
                at_end_of_backward(saving._levels.end)
            if saving.passes == number:
                saving._stream.look_ahead(ahead)
            else:
                saving._stream.ahead_bytes = ahead

        for leaf in leaves_of(result):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(reached)
                return

    def _look_at_inputs(self) -> None:
        """What the last block was given may have been written over since: it cannot be run again then."""
        kind, given = self._given
        if not given:
            self._may_not_run_again(kind)
        self._given = None, Untouched(())

    def _may_not_run_again(self, kind: Any) -> None:
        if self.known.never_again(kind):
            self.plan = None

    def _may_run_again(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return not is_listened_to(block) and is_plain((*args, *kwargs.values())) and self._can_recompute(block)

    def _forget_if_larger(self, kind: Any, size: int) -> None:
        """What was learned from smaller inputs does not hold."""
        known = self.known.of(kind)
        if known is None or size <= known.input_bytes:
            return
        self.known.forget(kind)
        self.plan = None
        self._levels.forget(size / max(1, known.input_bytes))
        self._passes_before = self.passes - 1  # this one is the first of them
        self._set_ways()
        if self.mode == "auto":
            self._is_packing = True
            try:
                self._sending = self._loose.forget(leaving=self._sending)
            finally:
                self._is_packing = False

    def _provisional(self, position: int, kind: Any) -> BlockPlan:
        """Before there is a plan: keep, if there is room for all that follows and for as much again. Not while nobody
        knows what the loss will take, as in the first pass."""
        known = self.known.of(kind)
        assert known is not None
        count = len(self._last_sequence) or len(self._blocks)
        ahead = max(1, count - position) + 1  # and one to compute with
        room = self._room()
        if 2 * known.saved_bytes * ahead + self._levels.rise_at_the_end(kind) > room:
            self._tight = True
            # The first one at least: backward comes to it last, when all gradients are there.
            return leanest(repeatable=known.repeatable, parts=known.parts) if position else OFFLOAD
        is_known = self._age > 1 or self._levels.knows_the_end or room == UNCOUNTED
        if is_known and (self.mode == "auto" or self._is_last()):
            return KEEP
        return BlockPlan(kind="recompute") if known.repeatable else OFFLOAD

    def _measure(
        self, kind: Any, size: int, block: nn.Module, original: Call, args: Any, kwargs: Any
    ) -> tuple[Any, int]:
        """Run the block plainly and see what it does; also the bytes that it keeps by that."""
        away = self._age == 1 or (self._tight and not self._has_room_as_last(kind))  # at first nobody knows how much
        tape = Tape(is_sure=not torch.is_autocast_enabled(self._device.type))
        measurement = self._measuring = Measurement(size, tape=tape)
        before = state_of(block, args, kwargs)
        timing = Measuring(
            measurement.tape,
            lambda call: timed(self._device, call),
            is_foreign=lambda: self._is_packing,
            is_weight=self._stream.is_weight,
        )
        mode: AbstractContextManager[Any] = timing
        if is_compiled(block):
            mode = contextlib.nullcontext()
        else:
            mode = contextlib.ExitStack()
            mode.enter_context(timing)
            mode.enter_context(Looking(tape, lambda: self._is_packing))
            mode.enter_context(calling(block.named_children(), self._see_part))
        try:
            with self._set(sending=away), mode:
                result, measurement.seconds = timed(self._device, lambda: original(*args, **kwargs))
        finally:
            self._measuring = None
            for tensor in attributes_of(block):
                measurement.tape.need(tensor)
            measurement.tape.close()
        still = state_of(block, args, kwargs) == before
        if not still:
            self._may_not_run_again(kind)
        measurement.repeatable = self.known.may_be_again(kind) and self._may_run_again(block, args, kwargs)
        if self.known.learn(kind, measurement, self.passes):
            self.plan = None
        return result, 0 if away else measurement.saved_bytes

    def _has_room_as_last(self, kind: Any) -> bool:
        """Whether the block that is being called may be kept: backward begins with the last one."""
        known = self.known.of(kind)
        if known is None or not self._is_last():
            return False
        return known.saved_bytes + self._levels.rise_at_the_end(kind) <= self._room()

    def _see_part(self, name: str, _part: nn.Module, original: Call, args: Any, kwargs: Any) -> Any:
        measurement = self._measuring
        if measurement is None:
            return original(*args, **kwargs)
        given = list(filter(has_plain_storage, tensors_in(args, kwargs)))
        return measurement.run_part(name, given, lambda: original(*args, **kwargs))

    @contextlib.contextmanager
    def _set(self, *, sending: bool) -> Iterator[None]:
        before = self._sending, self._in_block
        self._sending, self._in_block = sending, True
        try:
            yield
        finally:
            self._sending, self._in_block = before
