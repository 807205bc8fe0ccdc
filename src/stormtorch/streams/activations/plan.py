"""What becomes of each block's activations until backward: decided in one place, from measurements, as data.

Every block is kept, offloaded or recomputed, as a whole. The plan to begin with recomputes all of them: that is what a
loop with ``torch.utils.checkpoint`` around each block does. `choose` goes beyond it: it keeps the last blocks as far as
there is VRAM, since backward begins with them, and offloads the first ones as far as the link hides that and there is
RAM. Whether that is faster, steps tell (comparison.py).

What is left of VRAM differs from block to block (levels.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...core.sizes import format_bytes
from .levels import Rises, Way

_HIDDEN = 0.9  # of the time that compute gives the link


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """One block, measured. Times are the device's, from the first kernel to the last: where the host launches kernels
    more slowly than the device runs them, it is the host's time."""

    forward_s: float
    again_s: float  # a second run in backward
    input_bytes: int
    saved_bytes: int  # by autograd, if nothing is recomputed
    repeatable: bool = True  # whether it may be run a second time: it changes no buffers, and no hook listens


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """``kind``: "keep", "offload" or "recompute"; when recomputing, whether the block's inputs leave for RAM."""

    kind: str
    inputs_away: bool = False

    @property
    def way(self) -> Way:
        """How a block gets through backward."""
        return {"keep": "keep", "recompute": "whole"}.get(self.kind, "other")  # type: ignore[return-value]

    def sent_bytes(self, profile: BlockProfile) -> int:
        """What leaves a block of that profile in forward."""
        if self.kind == "offload":
            return profile.saved_bytes
        return profile.input_bytes if self.inputs_away else 0

    def held_bytes(self, *, input_bytes: int, saved_bytes: int) -> int:
        """What a block of which this is known leaves on the device between forward and backward."""
        if self.kind == "keep":
            return saved_bytes
        return input_bytes if self.kind == "recompute" and not self.inputs_away else 0


KEEP, OFFLOAD, RECOMPUTE = (BlockPlan(kind=kind) for kind in ("keep", "offload", "recompute"))
RECOMPUTE_FROM_RAM = BlockPlan(kind="recompute", inputs_away=True)


@dataclass(frozen=True, kw_only=True)
class ActivationPlan:
    """One plan for each block, and why. ``way_bytes``: of VRAM, by block, for what is on its way while backward is
    there; the last entry is for forward."""

    blocks: list[BlockPlan]
    reason: str
    way_bytes: list[int]
    spare_bytes: int = 0  # what is left of the room that all blocks together have

    def sent_bytes(self, profiles: Sequence[BlockProfile]) -> int:
        """What leaves all blocks in a forward."""
        return sum(plan.sent_bytes(profile) for plan, profile in zip(self.blocks, profiles, strict=True))


@dataclass(frozen=True, kw_only=True)
class Means:
    """What there is to use: the link's free rates; of VRAM, for each block, what activations may take while backward is
    there, and as the last entry when forward ends; of RAM, what activations may take. ``rises``: what each block takes
    itself while backward is in it. ``way_bytes`` at most are for what travels."""

    rooms: Sequence[int]
    rises: Sequence[Rises]
    out_bytes_per_s: float
    in_bytes_per_s: float
    way_bytes: int = 0
    ram_bytes: int = 0


class _Rooms:
    """What is left of each room. What a block holds counts in its own and in those of all that come after it; but the
    inputs of one that is recomputed not in its own: they are among what it takes itself (levels.py)."""

    def __init__(self, means: Means, count: int, *, way_bytes: int, keep: bool = False) -> None:
        """``keep``: all blocks are meant to be kept, not recomputed."""
        self.way_bytes = way_bytes
        self.left = [room - way_bytes for room in means.rooms]
        for index in range(count):
            self.left[index] -= means.rises[index].keep if keep else means.rises[index].whole

    def take(self, block: int, size: int) -> bool:
        """Whether ``block`` may hold ``size`` more bytes, which it then does."""
        if any(left < size for left in self.left[block:]):
            return False
        self.left[block:] = [left - size for left in self.left[block:]]
        return True

    def take_inputs(self, block: int, size: int) -> bool:
        """The same for the inputs of a block that is recomputed."""
        return self.take(block + 1, size)

    def take_instead(self, block: int, profile: BlockProfile, rise: Rises, *, held_bytes: int) -> bool:
        """Whether ``block`` may be kept, instead of being recomputed from ``held_bytes`` of inputs."""
        gain = rise.whole - rise.keep  # while backward is there, nothing is made a second time
        self.left[block] += gain
        self.left[block + 1 :] = [left + held_bytes for left in self.left[block + 1 :]]
        if self.take(block, profile.saved_bytes):
            return True
        self.left[block] -= gain
        self.left[block + 1 :] = [left - held_bytes for left in self.left[block + 1 :]]
        return False

    def ways(self, profiles: Sequence[BlockProfile], blocks: Sequence[BlockPlan]) -> list[int]:
        """What may be on its way at each block, given that some of it is still there when backward has got to the next.
        But what that one asks for first is among what it takes itself (levels.py)."""
        rooms = [max(0, min(self.way_bytes, self.way_bytes + left)) for left in self.left]
        asked = [profile.input_bytes if plan.inputs_away else 0 for profile, plan in zip(profiles, blocks, strict=True)]
        each = zip(rooms[1:-1], rooms, asked, strict=False)
        return [rooms[0], *(min(room, max(then, first)) for room, then, first in each), rooms[-1]]


class _Link:
    """The way out during forward. What one block sends may still be leaving while the next ones compute, as long as no
    more than ``slack`` bytes are behind; so what a block does not fill of its own time is not lost."""

    def __init__(self, profiles: list[BlockProfile], means: Means, *, slack: int) -> None:
        rate = _HIDDEN * min(means.out_bytes_per_s, 2 * means.in_bytes_per_s)  # backward is twice as long
        self._hidden = [rate * profile.forward_s for profile in profiles]
        self._sent = [0] * len(profiles)
        self._slack = slack

    def take(self, block: int, size: int) -> bool:
        """Whether ``block`` may send ``size`` more bytes with nothing late for it, which it then does."""
        self._sent[block] += size
        behind = 0.0
        for index, (hidden, sent) in enumerate(zip(self._hidden, self._sent, strict=True)):
            behind = max(0.0, behind + sent - hidden)
            if index >= block and behind > self._slack:
                self._sent[block] -= size
                return False
        return True


def recompute(profiles: list[BlockProfile], means: Means) -> ActivationPlan:
    """Every block that may be is recomputed, as with ``torch.utils.checkpoint`` around each. Inputs of blocks stay on
    the device as far as they fit, the last ones first; the others leave for RAM."""
    largest = max((profile.input_bytes for profile in profiles), default=0)
    rooms = _Rooms(means, len(profiles), way_bytes=min(means.way_bytes, 2 * largest))
    blocks = _recomputed(profiles, means, rooms)
    stay = sum(plan == RECOMPUTE for plan in blocks)
    reason = f"recomputed; the inputs of {stay} of {len(profiles)} blocks stay on the device"
    return _made(profiles, blocks, _with_others(reason, blocks), rooms)


def choose(profiles: list[BlockProfile], means: Means, *, offload: bool = True) -> ActivationPlan:
    """What should be fastest: keep what fits, offload what the link hides if that is wanted, recompute the rest."""
    means = means if offload else replace(means, ram_bytes=0)
    rooms = _Rooms(means, len(profiles), way_bytes=0, keep=True)
    if all(rooms.take(index, profile.saved_bytes) for index, profile in enumerate(profiles)):
        saved = sum(profile.saved_bytes for profile in profiles)
        return _made(profiles, [KEEP] * len(profiles), f"kept: {format_bytes(saved)} of activations fit", rooms)
    largest = max(profile.input_bytes for profile in profiles)
    saved = max(profile.saved_bytes for profile in profiles)
    plans = [_mixed(profiles, means, way_bytes=min(means.way_bytes, way)) for way in (2 * largest, 2 * saved)]
    return min(plans, key=lambda plan: cost_s(profiles, plan))


def cost_s(profiles: list[BlockProfile], plan: ActivationPlan) -> float:
    """The time for computing again."""
    blocks = zip(profiles, plan.blocks, strict=True)
    return sum(profile.again_s for profile, block in blocks if block.kind == "recompute")


def _mixed(profiles: list[BlockProfile], means: Means, *, way_bytes: int) -> ActivationPlan:
    """Like `recompute`; then the last blocks are kept, as far as there is room, and the first ones are offloaded, as
    far as link and RAM allow."""
    rooms = _Rooms(means, len(profiles), way_bytes=way_bytes)
    blocks = _recomputed(profiles, means, rooms)
    for index, profile in reversed(list(enumerate(profiles))):
        held = blocks[index].held_bytes(input_bytes=profile.input_bytes, saved_bytes=profile.saved_bytes)
        if blocks[index].kind == "recompute":
            if not rooms.take_instead(index, profile, means.rises[index], held_bytes=held):
                break
            blocks[index] = KEEP
    link = _Link(profiles, means, slack=rooms.way_bytes // 2)
    ram = means.ram_bytes - ActivationPlan(blocks=blocks, reason="", way_bytes=[]).sent_bytes(profiles)
    for index, profile in enumerate(profiles):
        if blocks[index].sent_bytes(profile):
            link.take(index, blocks[index].sent_bytes(profile))
        elif blocks[index].kind == "recompute" and profile.saved_bytes <= ram and link.take(index, profile.saved_bytes):
            blocks[index] = OFFLOAD
            ram -= profile.saved_bytes
    return _made(profiles, blocks, _with_others("", blocks), rooms)


def _recomputed(profiles: list[BlockProfile], means: Means, rooms: _Rooms) -> list[BlockPlan]:
    """All blocks recomputed, inputs on the device as far as they fit. One that may not be run again is kept where there
    is room, or offloaded."""
    blocks = [RECOMPUTE_FROM_RAM if profile.repeatable else OFFLOAD for profile in profiles]
    for index, profile in reversed(list(enumerate(profiles))):
        if not profile.repeatable:
            if rooms.take_instead(index, profile, means.rises[index], held_bytes=0):
                blocks[index] = KEEP
        elif rooms.take_inputs(index, profile.input_bytes):
            blocks[index] = RECOMPUTE
    return blocks


def _made(profiles: list[BlockProfile], blocks: list[BlockPlan], reason: str, rooms: _Rooms) -> ActivationPlan:
    return ActivationPlan(
        blocks=blocks,
        reason=reason,
        way_bytes=rooms.ways(profiles, blocks),
        spare_bytes=max(0, min(rooms.left, default=0)),
    )


def _with_others(reason: str, blocks: list[BlockPlan]) -> str:
    """``reason``, and how many blocks are not recomputed; or that alone."""
    counts = {name: sum(plan.kind == kind for plan in blocks) for name, kind in _NAMES}
    if reason and counts["recomputed"] == len(blocks):
        return reason
    listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"{listed} of {len(blocks)} blocks" + (f"; {reason}" if reason and counts["recomputed"] else "")


_NAMES = (("kept", "keep"), ("offloaded", "offload"), ("recomputed", "recompute"))


def with_reason(plan: ActivationPlan, reason: str) -> ActivationPlan:
    return replace(plan, reason=f"{plan.reason}; {reason}")
