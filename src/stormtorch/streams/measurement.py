"""What is learned about a block while it runs plainly: how long it takes, what it saves, where inside of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..memory.stopwatch import Reading
from .activation_plan import BlockProfile
from .tape import Tape
from .torch_private import has_plain_storage

_WORTHWHILE = 2  # a part is recomputed for itself if it saves so many times what it is given
_CHEAP = 0.02  # of a block's time: what leads to a part may take so much to be done once more


@dataclass(eq=False)
class Measurement:
    """A block that is being measured: what will be its profile."""

    input_bytes: int
    seconds: Reading = lambda: None
    tape: Tape = field(default_factory=Tape)
    storages: dict[int, tuple[int, str]] = field(default_factory=dict)  # saved: bytes and part, by number on the tape
    saved_by: dict[int, set[str]] = field(default_factory=dict)  # the parts that did, "" for none
    given: dict[str, dict[int, int]] = field(default_factory=dict)  # bytes that each part was called with
    gave: dict[str, weakref.ref[torch.Tensor]] = field(default_factory=dict)  # what each part answered with
    made: dict[str, int] = field(default_factory=dict)  # the storage of that
    given_by: dict[str, set[str]] = field(default_factory=dict)  # of parts, those that made what it was called with
    part: str = ""  # the child of the block that is running
    repeatable: bool = True

    def see(self, tensor: torch.Tensor, *, is_weight: bool = False) -> None:
        """Autograd saves ``tensor``. Weights stay where they are; but one that was cast for this is made again."""
        number = self.tape.save(tensor)  # not the address: what has left makes way for the next one at the same place
        if is_weight:
            return
        self.storages.setdefault(number, (tensor.untyped_storage().nbytes(), self.part))
        self.saved_by.setdefault(number, set()).add(self.part)

    def run_part(self, name: str, given: list[torch.Tensor], call: Callable[[], Any]) -> Any:
        """A child of the block runs, and was given these."""
        sizes = self.given.setdefault(name, {})
        for tensor in given:  # views of one storage travel together
            number = self.tape.number(tensor)
            sizes[number] = min(sizes.get(number, 0) + tensor.nbytes, tensor.untyped_storage().nbytes())
        makers = {maker for maker, made in self.gave.items() if any(tensor is made() for tensor in given)}
        self.given_by.setdefault(name, set()).update(makers)
        before, self.part = self.part, name
        self.tape.begin(name)
        try:
            result = call()
        finally:
            self.tape.end()
            self.part = before
        if isinstance(result, torch.Tensor) and has_plain_storage(result):
            self.gave[name] = weakref.ref(result)
            self.made[name] = self.tape.number(result)
        return result

    @property
    def saved_bytes(self) -> int:
        return sum(size for size, _ in self.storages.values())

    @property
    def parts(self) -> dict[str, int]:
        """Children that are worth recomputing one by one, with what is saved inside of each."""
        saved = {part: sum(size for size, inside in self.storages.values() if inside == part) for part in self.given}
        able = [part for part, sizes in self.given.items() if not sizes.keys() & self.tape.written_by[part]]
        given = {part: sum(self.given[part].values()) for part in able}
        return {part: saved[part] for part in able if saved[part] >= _WORTHWHILE * given[part] > 0}

    def leads(self, block_s: float) -> dict[str, str]:
        """To parts, the child that makes what they are given; of those that save what they make it from, are the same
        every time, and cheap in a block that takes ``block_s``."""
        parts = self.parts
        found: dict[str, str] = {}
        for child, made in self.made.items():
            tape, given = self.tape.parts.get(child), self.given[child]
            if child in parts or tape is None or not tape.is_sure or made in self.tape.written:
                continue
            is_from_saved = len(given) == 1 and given.keys() <= tape.saved - {made}
            is_cheap = (tape.seconds() or 0.0) <= _CHEAP * block_s
            if is_from_saved and is_cheap and not any(step.must_run for step in tape.steps):
                found.update((part, child) for part in parts if child in self.given_by[part])
        return found

    def between_bytes(self, leads: Mapping[str, str]) -> int:
        """What is saved if parts are recomputed: what they are given, unless it is made again, and what others save."""
        parts = self.parts
        made = {part: self.made[child] for part, child in leads.items()}
        given = {part: sizes for part, sizes in self.given.items() if part in parts}
        between = {
            number: size for part, sizes in given.items() for number, size in sizes.items() if number != made.get(part)
        }
        between |= {number: self.storages[number][0] for number, by in self.saved_by.items() if by - parts.keys()}
        return sum(between.values())

    def profile(self) -> BlockProfile | None:
        """None while the device has not finished."""
        seconds, of_operations, ranking = self.seconds(), self.tape.seconds(), self.tape.ranking()
        if seconds is None or of_operations is None or ranking is None:
            return None
        parts = self.parts
        forward_s = min(seconds, of_operations) if self.tape.steps else seconds  # it may have waited for what leaves
        leads = self.leads(forward_s)
        tapes = {part: tape for part, tape in self.tape.parts.items() if tape is not None and part in parts}
        return BlockProfile(
            forward_s=forward_s,
            input_bytes=self.input_bytes,
            saved_bytes=self.saved_bytes,
            operations=ranking,
            tape=self.tape,
            parts=parts,
            part_operations={part: tape.ranking() or {} for part, tape in tapes.items()},
            between_bytes=self.between_bytes({}),
            led_bytes=self.between_bytes(leads),
            leads=leads,
            repeatable=self.repeatable,
        )
