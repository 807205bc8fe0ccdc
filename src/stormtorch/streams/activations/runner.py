"""Runs blocks so that their activations survive until backward: kept, offloaded, or recomputed.

Blocks are wrapped as the user's own ``torch.utils.checkpoint`` around them would wrap them, and only while a pass of
the model runs under our saved-tensor hooks. planning.py says what happens to each block; whether it can happen is
decided after the block has run (recompute.py). A block is never run twice where user code would notice: where it
changes its buffers, as batch norm does, or has forward hooks. Such a block is kept or offloaded."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ...core.notices import say_once
from ...memory.cuda.stopwatch import timed
from ..bridge.module_calls import ModuleCall, WrappedCalls
from ..bridge.torch_private import (
    at_end_of_backward,
    current_pass,
    has_plain_storage,
    in_backward,
    in_functorch,
    innermost_hooks,
    never_traced,
)
from ..settings import Trial
from ..units.partition import blocks_of
from .offloading.offloaded import Held
from .offloading.stream import ActivationStream
from .outside_blocks import Loose
from .planning import REPLAN_AT, Planning
from .plans.levels import UNCOUNTED
from .plans.plan import KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_FROM_RAM, ActivationPlan, BlockPlan
from .plans.profiles import ROUNDS
from .plans.room import Gauge, Surroundings
from .recomputing.blocks import Anatomy, object_in, tensors_in
from .recomputing.conditions import Conditions
from .recomputing.recompute import BlockRun, Saved
from .recomputing.samples import Doubts

Call = Callable[..., Any]
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]  # for saved tensors: pack and unpack
SETTLED_AT = REPLAN_AT[-1]  # passes after which blocks are taken to go on as they did
_COMPARED = 4  # saved tensors of a block; the very last ones may be casts of weights
_ASYNCHRONOUS = frozenset({"cuda"})  # devices for which the host would wait


class Saving:
    """Decides what becomes of a model's blocks, pass by pass, and carries it out."""

    def __init__(
        self,
        model: nn.Module | None,
        mode: str,
        around: Surroundings,
        weights: Callable[[], Iterable[torch.Tensor]],
        trial: Trial,
    ) -> None:
        """``weights``: parameters and buffers that are permanently on the device."""
        self.mode, self._around = mode, around
        self._stream = ActivationStream(around, weights, must_leave=mode == "offload", trial=trial)
        self._gauge = Gauge(around, trial.activation_room)
        self._levels, self._loose = self._gauge.levels, Loose(self._stream, self._gauge)
        self.planning = Planning(mode, self._stream, self._gauge, self._loose)
        self.known = self.planning.known
        self._way_bytes = self._stream.ahead_bytes  # in-flight budget while there is no plan
        blocks = blocks_of(model) if model is not None else []
        self._noted_task = -1  # the last backward whose end will be noted
        self._chance, self._turn = random.Random(0), 0  # the block whose two runs are compared in this pass
        self._doubts = Doubts()
        self._numbers: dict[Any, int] = {}  # of shapes
        self._anatomies = [Anatomy(block, self._numbers) for block in blocks]
        self._wrapped = WrappedCalls(self)
        for index, block in enumerate(blocks):
            self._wrapped.wrap(block, functools.partial(_BlockCall, self, block, index))
        self._sequence: list[Any] = []  # the kinds of the blocks called in this pass
        self._last_sequence: list[Any] = []
        self._closed = False
        self._hooks: Hooks | None = None  # of the pass that runs
        self._run: BlockRun | None = None  # the block that is running
        self._undropped: BlockRun | None = None  # the previous block
        self._fits: dict[Any, bool] = {}  # of this pass, by shape: whether a second run has room for the weights
        self._held: list[int] = []  # bytes that each block of this pass has kept
        self._is_past_blocks = False
        self._keeps_all = False  # whether this pass, for which there is no plan, has kept every block so far
        self._input_bytes = 0  # of this pass: inputs of blocks that were offloaded for want of a plan
        self._is_noting = True  # how full the device is at each block of this pass

    @property
    def plan(self) -> ActivationPlan | None:
        return self.planning.plan

    # --- passes

    @contextlib.contextmanager
    def passing(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Iterator[None]:
        """Wrap a pass of the model, which runs under these saved-tensor hooks."""
        self._run = self._undropped = None  # left by a pass that an exception has ended
        self._stream.begin_pass()
        self._levels.begin()
        if self._sequence:
            self._last_sequence = self._sequence
        self.planning.begin_pass(self._last_sequence, self._held)
        self._is_noting = self.planning.notes_levels()
        self._loose.begin_pass()
        self._held, self._sequence, self._input_bytes = [], [], 0
        self._keeps_all, self._is_past_blocks = self.mode == "auto", False
        self._fits.clear()
        self._turn = self._chance.randrange(len(self._anatomies) or 1)
        self._doubts.look_back()
        self._hooks = pack, unpack
        self._set_ways()
        try:
            yield
        finally:
            self._drop_last()
            self._stream.send_all()
            self._hooks = None
            if self._is_noting:
                ours = self._stream.travelling_bytes() + (
                    0 if self._held else self._loose.size - self._loose.away_bytes
                )
                self._levels.reach(len(self._held), ours, self._stream.window_bytes)

    def _set_ways(self) -> None:
        """Set the in-flight budget for the beginning of a pass: 0 while it is not known whether there is room."""
        unknown = self.plan is None and (self.planning.age <= ROUNDS or bool(self._last_sequence))
        careful = unknown and self.mode != "offload" and self._gauge.room() < UNCOUNTED
        way_bytes = self.plan.way_bytes[-1] if self.plan is not None else 0 if careful else self._loose.way_bytes
        self._stream.window_bytes = self._stream.ahead_bytes = way_bytes
        self._stream.is_strict = self.plan is not None or careful or (self.mode == "auto" and self._loose.leaves)

    def rules_here(self) -> bool:
        """Whether to handle blocks called now: in a pass, and not inside a checkpoint of the user's."""
        if self._hooks is None or self._closed or self.mode in ("keep", "offload"):
            return False
        if in_backward() or in_functorch() or not torch.is_grad_enabled():
            return False
        hooks = innermost_hooks()
        return hooks is not None and hooks[0] == self._hooks[0]

    @never_traced
    def pack(self, tensor: torch.Tensor) -> Any:
        """Hook for autograd: the object that stands for ``tensor``, saved outside of blocks, until backward."""
        is_loose = not self._is_past_blocks and self.mode == "auto"
        if is_loose:
            age = self.planning.age
            self._loose.see(tensor, measured=age > ROUNDS, settled=age > REPLAN_AT[-1])
        if self.mode == "offload" or self._loose.is_leaving:
            return self._stream.pack(tensor)
        return self._loose.hold(tensor) if is_loose else Held(tensor)

    @never_traced
    def unpack(self, saved: Any) -> torch.Tensor:
        self.note_end()
        return saved.run.get(saved) if isinstance(saved, Saved) else self._stream.unpack(saved)

    def note_end(self) -> None:
        """Backward asks for saved tensors: note the level when it ends, before user code can reset the peak."""
        task = current_pass() if self._is_noting else -1
        if task not in (-1, self._noted_task):
            self._noted_task = task
            at_end_of_backward(self._levels.end)

    @property
    def wish_bytes(self) -> int:
        """Bytes that were offloaded only because it is not known yet whether there is room. For blocks: what a
        checkpoint around each would keep."""
        if self._last_sequence or self._sequence:
            return self._input_bytes  # in a pass without a plan
        return self._loose.away_bytes if self.planning.age <= ROUNDS else 0

    # --- blocks

    def close(self) -> None:
        """Unwrap the calls of the blocks, and return memory. The lanes must be empty."""
        self._closed = True
        self._wrapped.unwrap()
        self._stream.close()

    def call(self, index: int, block: nn.Module, original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block, and handle the tensors that it saves by the plan."""
        if self._run is not None:
            return original(*args, **kwargs)  # it is inside another block
        assert self._hooks is not None
        self._stream.send_all()
        self._drop_last()
        given = (args, tuple(kwargs.values()))
        leaves = tensors_in(given)
        anatomy, entries = self._look(index, block)
        manner = anatomy.manner(entries)
        kind = (anatomy.shape, manner, tuple([leaf.requires_grad for leaf in leaves]))
        plain = [leaf for leaf in leaves if has_plain_storage(leaf)]
        size, input_bytes = sum(x.nbytes for x in plain), sum(x.nbytes for x in plain if x.requires_grad)
        if self.planning.begin_block(kind, size):
            self._begin_larger()
        position = len(self._sequence)
        self._sequence.append(kind)
        plan = self.planning.for_block(position, kind) or self._provisional(position, kind, input_bytes)
        is_measured = self.known.wants(kind, self.planning.passes)
        compares, waits = self._compares(index, is_measured)
        may_drop = (plan.kind != "keep" or is_measured) and self._may_run_again(anatomy, kind, block, given)
        if plan.kind == "recompute" and not may_drop:
            plan = OFFLOAD
        run = BlockRun(
            block,
            kind,
            original,
            args,
            kwargs,
            Conditions(anatomy, entries, manner[1], self._around.device) if may_drop else None,
            stream=self._stream,
            sends=plan.kind == "offload",
            # Plans have been made from enough passes to take it that blocks go on as they did.
            settled=plan.kind == "recompute"
            and not (compares or is_measured or self.plan is None)
            and self.planning.age > SETTLED_AT,
            compares=compares,
            is_certain=functools.partial(self._doubts.ask if waits else self._doubts.note, index),
            unpack=self._hooks[1],
        )
        refused = self._stream.refused_bytes
        self._run = run
        try:
            with saved_tensors_hooks(run.pack, run.unpack):
                if is_measured:
                    result, reading = timed(self._around.device, functools.partial(original, *args, **kwargs))
                else:
                    result, reading = original(*args, **kwargs), None
        finally:
            self._run = None
        if plan.kind == "offload":
            self._stream.send_all()  # no operation is running now: RAM has room for all of it, or not
        if run.end(result, look_inside=is_measured) != may_drop:
            self.planning.never_again(kind)
        if reading is not None:
            self.known.learn(kind, self.planning.passes, size, input_bytes, run.saved_bytes(), reading)
        plan = self._end_block(run, plan, input_bytes, is_refused=self._stream.refused_bytes > refused)
        if len(self._sequence) == self._count():
            self._drop_last()  # the loss needs the memory, and comes before the next block
            # Backward begins with what is saved from here on.
            self._loose.is_leaving, self._is_past_blocks = False, True
        held = plan.held_bytes(input_bytes=input_bytes, saved_bytes=self.known.saved_bytes(kind))
        self._held.append(held)
        self._levels.hold(kind, plan.kind, held)
        self._watch(position, result)
        return result

    def _look(self, index: int, block: nn.Module) -> tuple[Anatomy, list[Any]]:
        """The block's modules, and what their tables contain."""
        if (entries := self._anatomies[index].look()) is None:  # user code has added or replaced children
            self._anatomies[index] = Anatomy(block, self._numbers)
            entries = self._anatomies[index].layout.entries()
        return self._anatomies[index], entries

    def _compares(self, index: int, is_measured: bool) -> tuple[int, bool]:
        """How many saved tensors of a block to compare between its two runs, and whether the host waits for that: all
        of a block that is measured, the last few of each block in the first passes and of one that has differed since,
        and later of one block a pass, by chance."""
        if is_measured:
            return sys.maxsize, True
        if self.planning.age <= ROUNDS or index in self._doubts.suspects:
            return _COMPARED, True
        return (_COMPARED if index == self._turn else 0), self._around.device.type not in _ASYNCHRONOUS

    def _end_block(self, run: BlockRun, plan: BlockPlan, input_bytes: int, *, is_refused: bool) -> BlockPlan:
        """Decide what becomes of a block that has run; may differ from ``plan``."""
        if plan.kind == "offload" and is_refused and run.repeats:
            plan = RECOMPUTE  # RAM has run out
        if plan.kind != "recompute":
            run.stay()
            return plan
        if not run.repeats:
            run.send()
            return OFFLOAD
        if self.plan is None and plan.inputs_away:
            self._input_bytes += input_bytes
        run.inputs_away = plan.inputs_away
        if run.is_settled:
            run.drop()
        else:
            self._undropped = run
        return plan

    def _drop_last(self) -> None:
        """Release what the previous block has saved. Called when the next one begins: inputs may be overwritten in
        between, as by ``x.add_(block(x))``, and then it cannot run again."""
        run, self._undropped = self._undropped, None
        if run is None:
            return
        if run.has_its_inputs():
            run.drop()
        else:
            self.planning.never_again(run.kind)
            run.send()

    def _provisional(self, position: int, kind: Any, input_bytes: int) -> BlockPlan:
        """Decide before there is a plan. Recompute, with inputs on the device if there is room for those of all later
        blocks. Keep if there is room for all blocks twice over, but not before it is known what the loss will take.
        Never keep some of them: the pool grows by the peak of these passes, and would stay smaller than with none
        kept."""
        room, end = self._gauge.room(), self._levels.rise_at_the_end(kind)
        if room == UNCOUNTED:
            return KEEP if self.mode == "auto" else RECOMPUTE
        is_known, saved = self.known.size(kind) is not None, self.known.saved_bytes(kind)
        knows_the_end = self.planning.age > 1 or self._levels.knows_the_end
        ahead = max(1, self._count() - position) + 1  # one more, to compute with
        if self._keeps_all and is_known and knows_the_end and 2 * saved * ahead + end <= room:
            return KEEP
        self._keeps_all = False
        is_tight = input_bytes * ahead + 2 * saved + end > room or (not knows_the_end and self._gauge.is_filling())
        return RECOMPUTE_FROM_RAM if is_tight else RECOMPUTE

    def _count(self) -> int:
        """How many blocks this pass should call."""
        return len(self._last_sequence) or len(self._anatomies)

    def _watch(self, position: int, result: Any) -> None:
        """Notice when backward reaches the block: its output gets a gradient. Not where that tells nothing. Where
        later blocks offload, memory of theirs may have to be returned by then."""
        offloads = self._stream.has_offloaded or (self.plan is not None and self.plan.offloads)
        if not self._is_noting and not offloads:
            return
        way = self.plan.way_bytes if self.plan is not None else []
        ahead = way[position] if position < len(way) - 1 else 0 if self._stream.is_strict else self._way_bytes
        noting, this, number = self._is_noting, weakref.ref(self), self.planning.passes

        def reached(_gradient: torch.Tensor) -> None:
            saving = this()
            if saving is None:
                return
            if saving.planning.passes != number:
                saving._stream.ahead_bytes = ahead
                return
            if noting:
                saving._levels.reach(position, saving._stream.travelling_bytes(), ahead)
                at_end_of_backward(saving._levels.end)
            saving._stream.look_ahead(ahead)

        output = next((tensor for tensor in tensors_in(result) if tensor.grad_fn is not None), None)
        if output is not None:
            output.register_hook(reached)

    def _may_run_again(self, anatomy: Anatomy, kind: Any, block: nn.Module, given: tuple[Any, ...]) -> bool:
        """Whether a second run of the block would go unnoticed, as far as is known before it runs."""
        if (argument := object_in(given)) is not None:
            name, what = type(block).__name__, type(argument).__name__
            hint = "; for models of transformers set model.config.use_cache = False" if "Cache" in what else ""
            say_once(
                f"{name} is given a {what}, which a second run would change: its activations are kept or "
                f"offloaded, never recomputed{hint}.",
                key=f"{name} is given a {what}",
            )
            return False
        if anatomy.shape not in self._fits:
            self._fits[anatomy.shape] = self._around.can_recompute(block)
        return (
            self._fits[anatomy.shape]
            and self.known.is_repeatable(kind)
            and not anatomy.is_listened_to()
            and anatomy.has_its_own
        )

    def _begin_larger(self) -> None:
        """Inputs are larger than those that were measured: go on as before there was a plan."""
        self._is_noting = self.planning.notes_levels()
        self._set_ways()
        if self.mode == "auto":
            self._loose.forget()


class _BlockCall(ModuleCall[Saving]):
    """The wrapped call of block number ``index``."""

    def __init__(self, saving: Saving, module: nn.Module, index: int, original: Call) -> None:
        super().__init__(saving, module, original)
        self._index = index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        saving, module = self._owner(), self._module()
        if saving is None or module is None or not saving.rules_here():
            return self._original(*args, **kwargs)
        return saving.call(self._index, module, self._original, args, kwargs)
