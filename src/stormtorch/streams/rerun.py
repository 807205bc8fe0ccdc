"""Runs a block so that backward runs it again: as a whole, or part by part.

A part is a child of the block. What it is given would have to be kept for it; but where another child has just made
that from something that is kept anyway, as a norm does, it is made once more: that child *leads* to the part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from .activations import ActivationStream
from .block_call import Call, calling
from .blocks import filled, in_manner, is_compiled, is_plain, leaves_of, manner_of
from .replay import Recording, Replaying
from .tape import Operation, Tape


class Lead:
    """What a child has made for a part, and how it is made again."""

    def __init__(self, child: nn.Module, call: Call, given: torch.Tensor, made: torch.Tensor) -> None:
        self._given: torch.Tensor | None = given
        self._made: torch.Tensor | None = made
        self._child, self._call, self._manner = child, call, manner_of(child)
        self._versions = given._version, made._version
        self._trained = made.requires_grad

    def instead_of(self, leaf: Any) -> torch.Tensor | None:
        """What to keep for ``leaf``: what the child made it from, if it did, and nothing was done to either since."""
        given, made = self._given, self._made
        if given is None or made is None or leaf is not made:
            return None
        return given if self._versions == (given._version, made._version) else None

    def get(self, given: torch.Tensor) -> torch.Tensor:
        """What was made, the first time; then what is made of ``given``, which is what it was made of. Neither stays
        until then: what is kept is autograd's business."""
        made, self._given, self._made = self._made, None, None
        return self._make(given) if made is None else made

    def _make(self, given: torch.Tensor) -> torch.Tensor:
        """With gradients, as it was made at first, or another kernel might do it; but backward needs none of that."""
        with saved_tensors_hooks(lambda _tensor: None, _never), in_manner(self._child, self._manner):
            made: torch.Tensor = self._call(given)
        return made.detach().requires_grad_(self._trained)


def _is_ordinary(value: Any) -> bool:
    return type(value) is torch.Tensor and not value.is_inference()


def _never(_nothing: None) -> torch.Tensor:
    raise AssertionError("nobody runs backward through what is made again")


def recomputed(
    stream: ActivationStream,
    away: Mapping[Operation, bool],
    tape: Tape,
    block: nn.Module,
    original: Call,
    args: Any,
    kwargs: Any,
    lead: Lead | None = None,
) -> Any:
    """Run ``original``, which is ``block``'s or a part's, and again in backward, but for the results that ``away``
    names: those are in RAM then (True) or stay (False)."""
    leaves = leaves_of((*args, *kwargs.values()))
    form = filled((*args, *kwargs.values()), iter([None] * len(leaves)))  # tensors must not stay in there
    count, names, manner = len(args), list(kwargs), manner_of(block)
    kept = [None if lead is None else lead.instead_of(leaf) for leaf in leaves]
    led = [place for place, instead in enumerate(kept) if instead is not None]
    leaves = [leaf if instead is None else instead for leaf, instead in zip(leaves, kept, strict=True)]
    used = lead if led else None
    once = list({id(leaf): leaf for leaf in leaves}.values())  # what is given twice is the same thing twice
    numbers = {id(leaf): number for number, leaf in enumerate(once)}
    which = [numbers[id(leaf)] for leaf in leaves]
    replaying: Replaying | None = None

    def run(*given: Any) -> Any:
        values = [given[number] for number in which]
        if used is not None:
            with contextlib.nullcontext() if replaying is None else replaying.paused():
                made = used.get(values[led[0]])
            values = [made if place in led else value for place, value in enumerate(values)]
        values = filled(form, iter(values))
        with in_manner(block, manner):  # backward may come after eval()
            return original(*values[:count], **dict(zip(names, values[count:], strict=True)))

    if away and not is_compiled(block):
        recording = Recording(away, stream, tape)
        replaying = Replaying(recording, stream)
        contexts = recording, replaying
        return checkpoint(run, *once, use_reentrant=False, context_fn=lambda: contexts)
    return checkpoint(run, *once, use_reentrant=False)


def in_parts(
    stream: ActivationStream,
    away: Mapping[Operation, bool],
    tape: Tape,
    block: nn.Module,
    original: Call,
    args: Any,
    kwargs: Any,
    *,
    parts: tuple[str, ...],
    leads: Mapping[str, str],
    is_ours: Callable[[], bool],
) -> Any:
    """Run ``block``, and its ``parts`` again in backward. ``leads``: the child that leads to a part, by the part's
    name. ``is_ours``: whether a part that is called now is ours to arrange."""
    leading: dict[str, Lead] = {}
    wanted = {leads[part] for part in parts if part in leads}

    def call_part(name: str, part: nn.Module, original: Call, args: Any, kwargs: Any) -> Any:
        if not is_ours() or not is_plain((*args, *kwargs.values())):
            return original(*args, **kwargs)
        part_tape = tape.parts.get(name) or Tape()
        results = {name: away[name] for name in part_tape.operations if name in away}
        lead = leading.pop(leads.get(name, ""), None)
        return recomputed(stream, results, part_tape, part, original, args, kwargs, lead)

    def call(name: str, child: nn.Module, original: Call, args: Any, kwargs: Any) -> Any:
        if name in parts:
            return call_part(name, child, original, args, kwargs)
        result = original(*args, **kwargs)
        if len(args) == 1 and not kwargs and is_ours() and all(map(_is_ordinary, (*args, result))):
            leading[name] = Lead(child, original, args[0], result)
        return result

    children = [(name, child) for name, child in block.named_children() if name in wanted or name in parts]
    with calling(children, call):
        return original(*args, **kwargs)
