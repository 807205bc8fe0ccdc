"""What is learned about a block while it runs plainly: how long it takes, what it saves, where inside of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from ..memory.stopwatch import Reading
from .activation_plan import BlockProfile
from .tape import Tape

_WORTHWHILE = 2  # a part is recomputed for itself if it saves so many times what it is given


@dataclass(eq=False)
class Measurement:
    """A block that is being measured: what will be its profile."""

    input_bytes: int
    seconds: Reading = lambda: None
    tape: Tape = field(default_factory=Tape)
    storages: dict[int, tuple[int, str]] = field(default_factory=dict)  # saved: bytes and part, by number on the tape
    saved_by: dict[int, set[str]] = field(default_factory=dict)  # the parts that did, "" for none
    given: dict[str, dict[int, int]] = field(default_factory=dict)  # bytes that each part was called with
    part: str = ""  # the child of the block that is running
    repeatable: bool = True
    is_packing: bool = False  # what runs now sends an activation away, and is not the block's

    def see(self, tensor: torch.Tensor) -> None:
        """Autograd saves ``tensor``."""
        number = self.tape.save(tensor)  # not the address: what has left makes way for the next one at the same place
        self.storages.setdefault(number, (tensor.untyped_storage().nbytes(), self.part))
        self.saved_by.setdefault(number, set()).add(self.part)

    @contextlib.contextmanager
    def in_part(self, name: str, given: Iterable[torch.Tensor]) -> Iterator[None]:
        """A child of the block runs, and was given these."""
        self.given.setdefault(name, {}).update((self.tape.number(tensor), tensor.nbytes) for tensor in given)
        before, self.part = self.part, name
        self.tape.begin(name)
        try:
            yield
        finally:
            self.tape.end()
            self.part = before

    @property
    def saved_bytes(self) -> int:
        return sum(size for size, _ in self.storages.values())

    @property
    def parts(self) -> dict[str, int]:
        """Children that are worth recomputing one by one, with what is saved inside of each."""
        saved = {part: sum(size for size, inside in self.storages.values() if inside == part) for part in self.given}
        given = {part: sum(sizes.values()) for part, sizes in self.given.items()}
        return {part: size for part, size in saved.items() if size >= _WORTHWHILE * given[part] > 0}

    @property
    def between_bytes(self) -> int:
        """What is saved if these are recomputed: what they are given, and what others save."""
        parts = self.parts
        between = {number: size for part in parts for number, size in self.given[part].items()}
        between |= {number: self.storages[number][0] for number, by in self.saved_by.items() if by - parts.keys()}
        return sum(between.values())

    def profile(self) -> BlockProfile | None:
        """None while the device has not finished."""
        seconds, of_operations, ranking = self.seconds(), self.tape.seconds(), self.tape.ranking()
        if seconds is None or of_operations is None or ranking is None:
            return None
        parts = self.parts
        tapes = {part: tape for part, tape in self.tape.parts.items() if tape is not None and part in parts}
        return BlockProfile(
            forward_s=min(seconds, of_operations) if self.tape.steps else seconds,  # it may have waited for what leaves
            input_bytes=self.input_bytes,
            saved_bytes=self.saved_bytes,
            operations=ranking,
            tape=self.tape,
            parts=parts,
            part_operations={part: tape.ranking() or {} for part, tape in tapes.items()},
            between_bytes=self.between_bytes,
            repeatable=self.repeatable,
        )
