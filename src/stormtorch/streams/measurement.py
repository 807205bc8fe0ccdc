"""What is learned about a block while it runs plainly: how long it takes, what it saves, where inside of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..memory.stopwatch import Reading
from .activation_plan import BlockProfile

_WORTHWHILE = 2  # a part is recomputed for itself if it saves so many times what it is given


@dataclass(eq=False)
class Measurement:
    """A block that is being measured: what will be its profile."""

    input_bytes: int
    seconds: Reading = lambda: None
    operations: dict[Any, tuple[int, Reading]] = field(default_factory=dict)
    storages: dict[int, tuple[int, str]] = field(default_factory=dict)  # saved by autograd: bytes and part, by address
    given: dict[str, int] = field(default_factory=dict)  # bytes that each part was called with
    part: str = ""  # the child of the block that is running
    needed: int = 0  # operations that came before something was saved; the results of others are never asked for
    repeatable: bool = True

    def see(self, tensor: torch.Tensor, *, operations: int) -> None:
        """Autograd saves ``tensor``, after so many operations."""
        self.needed = operations
        storage = tensor.untyped_storage()
        self.storages.setdefault(storage.data_ptr(), (storage.nbytes(), self.part))

    @property
    def saved_bytes(self) -> int:
        return sum(size for size, _ in self.storages.values())

    @property
    def parts(self) -> dict[str, int]:
        """Children that are worth recomputing one by one, with what is saved inside of each."""
        saved = {part: sum(size for size, inside in self.storages.values() if inside == part) for part in self.given}
        return {part: size for part, size in saved.items() if size >= _WORTHWHILE * self.given[part] > 0}

    def profile(self) -> BlockProfile | None:
        """None while the device has not finished."""
        seconds = self.seconds()
        needed = list(self.operations.items())[: self.needed]
        operations = {name: (size, reading()) for name, (size, reading) in needed}
        if seconds is None or any(duration is None for _, duration in operations.values()):
            return None
        return BlockProfile(
            forward_s=seconds,
            input_bytes=self.input_bytes,
            saved_bytes=self.saved_bytes,
            operations={name: (size, duration or 0.0) for name, (size, duration) in operations.items()},
            parts=self.parts,
            repeatable=self.repeatable,
        )
