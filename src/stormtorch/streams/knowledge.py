"""What is known of a model's blocks, by kind: two measurements, the second because the first is cold; then a profile,
once the device has told its times. And which of them may not be run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .activation_plan import BlockProfile
from .measurement import Measurement

ROUNDS = 2


class Knowledge:
    """A kind is a tuple that begins with the block's shape (blocks.py)."""

    def __init__(self) -> None:
        self.profiles: dict[Any, BlockProfile] = {}
        self._measured: dict[Any, Measurement] = {}  # the device may still be at it
        self._passes: dict[Any, list[int]] = {}  # in which a kind was measured
        self._not_again: set[Any] = set()  # shapes of blocks that have shown that they cannot be run again

    def __bool__(self) -> bool:
        return bool(self.profiles or self._measured)

    def of(self, kind: Any) -> Measurement | BlockProfile | None:
        """The latest."""
        return self._measured.get(kind) or self.profiles.get(kind)

    def planned_with(self, kind: Any) -> Measurement | BlockProfile:
        """The profile; of a kind that has none yet, the measurement."""
        return self.profiles.get(kind) or self._measured[kind]

    def passes_of(self, kind: Any) -> Sequence[int]:
        """The passes in which it was measured."""
        return self._passes.get(kind, ())

    def learn(self, kind: Any, measurement: Measurement, in_pass: int) -> bool:
        """Blocks of a kind, and passes, may differ in size: the largest counts. In whether they may be run again, they
        may not differ. True if it is new that they may not."""
        self._passes.setdefault(kind, []).append(in_pass)
        known = self.of(kind)
        if known is None or known.input_bytes <= measurement.input_bytes:
            self._measured[kind] = measurement
            return False
        return not measurement.repeatable and self.never_again(kind)

    def forget(self, kind: Any) -> None:
        for table in (self.profiles, self._measured, self._passes):
            table.pop(kind, None)

    def may_be_again(self, kind: Any) -> bool:
        return kind[0] not in self._not_again

    def never_again(self, kind: Any) -> bool:
        """It may not be run again, nor may any other kind of the same shape. False if that was known."""
        shape = kind[0]
        if shape in self._not_again:
            return False
        self._not_again.add(shape)
        for measured in (kind for kind in self._measured if kind[0] == shape):
            self._measured[measured].repeatable = False
        for known in (kind for kind in self.profiles if kind[0] == shape):
            self.profiles[known] = replace(self.profiles[known], repeatable=False)
        return True

    def profiles_of(self, kinds: Sequence[Any]) -> list[BlockProfile] | None:
        """Of blocks of these kinds; None as long as one of them is not fully measured."""
        for kind, measurement in list(self._measured.items()):
            profile = measurement.profile()
            if profile is not None:
                self.profiles[kind] = profile
                del self._measured[kind]
        if any(len(self.passes_of(kind)) < ROUNDS for kind in kinds):
            return None
        if any(kind in self._measured or kind not in self.profiles for kind in kinds):
            return None  # the device is still at it
        return [self.profiles[kind] for kind in kinds]
