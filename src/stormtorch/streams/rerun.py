"""Runs a block so that backward runs it again: as a whole, or part by part.

A part is a child of the block. What it is given would have to be kept for it; but where another child has just made
that from something that is kept anyway, as a norm does, it is made once more: that child *leads* to the part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from .activations import ActivationStream
from .block_call import Call, calling
from .blocks import (
    Surroundings,
    filled,
    identities_of,
    in_manner,
    is_compiled,
    is_plain,
    leaves_of,
    leaving_nothing,
    manner_of,
)
from .replay import Listening, Recording, Replaying
from .tape import Operation, Tape


class Lead:
    """What a child has made, and from what."""

    def __init__(self, recipe: Recipe, given: torch.Tensor, made: torch.Tensor) -> None:
        self.recipe, self._given, self._made = recipe, given, made
        self._versions = given._version, made._version

    def instead_of(self, leaf: Any) -> torch.Tensor | None:
        """What to keep for ``leaf``: what the child made it from, if it did, and nothing was done to either since."""
        as_it_was = self._versions == (self._given._version, self._made._version)
        return self._given if leaf is self._made and as_it_was else None


class Recipe:
    """How a child makes it again. Holds no tensors: what is kept is autograd's business."""

    def __init__(self, child: nn.Module, call: Call, made: torch.Tensor) -> None:
        self._child, self._call, self._manner = child, call, manner_of(child)
        self._trained, self._kind, self._around = made.requires_grad, made.device.type, Surroundings()

    def make(self, given: torch.Tensor) -> torch.Tensor:
        """With gradients, as it was made at first, or another kernel might do it; but the graph of that is dropped."""
        plainly = saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)  # itself would hold its own graph
        with (
            plainly,
            torch.autocast(self._kind, enabled=False),
            in_manner(self._child, self._manner),
            self._around.again(),
        ):
            made: torch.Tensor = self._call(given)
        return made.detach().requires_grad_(self._trained)


def lead_of(
    child: nn.Module, call: Call, args: Any, kwargs: Any, tape: Tape | None, is_foreign: Callable[[], bool]
) -> tuple[Any, Lead | None]:
    """Run a child that should lead to a part; what it gives, and whether it leads: if it ran as on ``tape``."""
    is_one = not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor)
    if not is_one or tape is None or torch.is_autocast_enabled(args[0].device.type):
        return call(*args, **kwargs), None
    with Listening(is_foreign) as listening:
        made = call(*args)
    as_on_tape = listening.names == [name for name, _ in tape.operations]
    is_ordinary = all(type(value) is torch.Tensor and not value.is_inference() for value in (*args, made))
    return made, Lead(Recipe(child, call, made), args[0], made) if as_on_tape and is_ordinary else None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A call of a block, or of a part of one, that is made again in backward, but for the results that ``away`` names:
    those are in RAM then (True) or stay (False)."""

    stream: ActivationStream
    away: Mapping[Operation, bool]
    tape: Tape
    module: nn.Module
    original: Call
    args: Any
    kwargs: Any


def recomputed(run: Run, lead: Lead | None = None) -> Any:
    """Make the call, and again in backward."""
    block, args, kwargs = run.module, run.args, run.kwargs
    leaves = leaves_of((*args, *kwargs.values()))
    form = filled((*args, *kwargs.values()), iter([None] * len(leaves)))  # tensors must not stay in there
    original, count, names, manner = run.original, len(args), list(kwargs), manner_of(block)
    kept = [None if lead is None else lead.instead_of(leaf) for leaf in leaves]
    led = [place for place, instead in enumerate(kept) if instead is not None]
    made = [leaves[place] for place in led[:1]]  # until it is used for the first time
    recipe = lead.recipe if lead is not None else None
    leaves = [leaf if instead is None else instead for leaf, instead in zip(leaves, kept, strict=True)]
    once = list({id(leaf): leaf for leaf in leaves}.values())  # what is given twice is the same thing twice
    numbers = {id(leaf): number for number, leaf in enumerate(once)}
    which = [numbers[id(leaf)] for leaf in leaves]
    replaying: Replaying | None = None
    around, is_second = Surroundings(), False

    def call(*given: Any) -> Any:
        nonlocal is_second
        values = [given[number] for number in which]
        if recipe is not None and led:
            with contextlib.nullcontext() if replaying is None else replaying.paused():
                value = made.pop() if made else recipe.make(values[led[0]])
            values = [value if place in led else other for place, other in enumerate(values)]
        values = filled(form, iter(values))
        with contextlib.ExitStack() as stack:
            if is_second:
                stack.enter_context(in_manner(block, manner))  # backward may come after eval()
                stack.enter_context(around.again())
                stack.enter_context(leaving_nothing(block))
            is_second = True
            return original(*values[:count], **dict(zip(names, values[count:], strict=True)))

    if run.away and not is_compiled(block):
        recording = Recording(run.away, run.stream, run.tape, block)
        replaying = Replaying(recording, run.stream)
        contexts = recording, replaying
        return checkpoint(call, *once, use_reentrant=False, context_fn=lambda: contexts)
    return checkpoint(call, *once, use_reentrant=False)


def in_parts(
    run: Run,
    *,
    parts: tuple[str, ...],
    leads: Mapping[str, str],
    is_ours: Callable[[], bool],
    is_foreign: Callable[[], bool],
) -> Any:
    """Run the block, and its ``parts`` again in backward. ``leads``: the child that leads to a part, by the part's
    name. ``is_ours``: whether a part that is called now is ours to arrange; ``is_foreign``: whether what runs is not
    the block's."""
    leading: dict[str, Lead | None] = {}
    tape, own = run.tape, set(identities_of(run.module))

    def call(name: str, child: nn.Module, original: Call, args: Any, kwargs: Any) -> Any:
        given = *args, *kwargs.values()
        if not is_ours() or not is_plain(given) or not own.issuperset(identities_of(child)):
            return original(*args, **kwargs)
        if name not in parts:
            result, leading[name] = lead_of(child, original, args, kwargs, tape.parts.get(name), is_foreign)
            return result
        part_tape = tape.parts.get(name) or Tape()
        away = {operation: run.away[operation] for operation in part_tape.operations if operation in run.away}
        part = replace(run, away=away, tape=part_tape, module=child, original=original, args=args, kwargs=kwargs)
        return recomputed(part, leading.get(leads.get(name, "")))

    leaders = {leads[part] for part in parts if part in leads}
    children = [(name, child) for name, child in run.module.named_children() if name in leaders or name in parts]
    with calling(children, call):
        return run.original(*run.args, **run.kwargs)
