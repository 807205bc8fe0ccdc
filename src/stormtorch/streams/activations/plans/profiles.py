"""Measurements of a model's blocks, by kind: the sizes of inputs and saved tensors, times, and whether a block may run
a second time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ....memory.cuda.stopwatch import Reading
from .plan import BlockProfile

ROUNDS = 2  # passes in which a kind is measured; the first one is cold


@dataclass
class _Known:
    """A kind that is being measured. Its times are read when the device has reported them."""

    size: int = 0  # of all arguments
    input_bytes: int = 0  # of these, those that must be held for it
    saved_bytes: int = 0
    passes: set[int] = field(default_factory=set)
    forward: list[Reading] = field(default_factory=list)

    def profile(self, repeatable: bool) -> BlockProfile | None:
        """The profile; None while the device has reported no time."""
        times_s = [time_s for reading in self.forward if (time_s := reading()) is not None]
        if not times_s:
            return None
        sizes = {"input_bytes": self.input_bytes, "saved_bytes": self.saved_bytes}
        return BlockProfile(forward_s=min(times_s), repeatable=repeatable, **sizes)


class Profiles:
    """Measurements by kind: a tuple that begins with the block's shape (blocks.py)."""

    def __init__(self) -> None:
        self._known: dict[Any, _Known] = {}
        self._guessed: dict[Any, int] = {}  # estimates of saved bytes, for kinds that were forgotten
        self._not_again: set[Any] = set()  # shapes of blocks that may not run again

    def __bool__(self) -> bool:
        return bool(self._known)

    def size(self, kind: Any) -> int | None:
        """The bytes of the largest inputs that were measured; None for an unknown kind."""
        known = self._known.get(kind)
        return None if known is None else known.size

    def saved_bytes(self, kind: Any) -> int:
        """Bytes that such a block saves; a guess for one that was forgotten, 0 for one that was never seen."""
        known = self._known.get(kind)
        return self._guessed.get(kind, 0) if known is None else known.saved_bytes

    def wants(self, kind: Any, in_pass: int) -> bool:
        """Whether to measure a call of that kind in this pass: one call a pass, in the first passes."""
        known = self._known.get(kind)
        return known is None or (len(known.passes) < ROUNDS and in_pass not in known.passes)

    def learn(self, kind: Any, in_pass: int, size: int, input_bytes: int, saved_bytes: int, forward: Reading) -> None:
        """Note a measured call with inputs of ``size``. Calls of a kind may differ: the largest counts."""
        known = self._known.setdefault(kind, _Known())
        known.size = max(known.size, size)
        known.input_bytes, known.saved_bytes = max(known.input_bytes, input_bytes), max(known.saved_bytes, saved_bytes)
        known.passes.add(in_pass)
        known.forward.append(forward)

    def forget(self, kind: Any, growth: float) -> None:
        """Drop measurements: inputs have grown by the factor ``growth``."""
        known = self._known.pop(kind, None)
        if known is not None:
            self._guessed[kind] = round(known.saved_bytes * growth)

    def is_repeatable(self, kind: Any) -> bool:
        return kind[0] not in self._not_again

    def never_again(self, kind: Any) -> bool:
        """Note that blocks of that shape may not run again. Returns True if that is new."""
        is_new = kind[0] not in self._not_again
        self._not_again.add(kind[0])
        return is_new

    def of(self, kinds: Sequence[Any]) -> list[BlockProfile] | None:
        """The profiles of blocks of these kinds; None as long as one of them is not measured."""
        found: dict[Any, BlockProfile] = {}
        for kind in set(kinds):
            known = self._known.get(kind)
            if known is None or len(known.passes) < ROUNDS or not (profile := known.profile(self.is_repeatable(kind))):
                return None
            found[kind] = profile
        return [found[kind] for kind in kinds] or None
