"""Plans what becomes of each block's activations until backward, from measurements, as data.

Every block is kept, offloaded or recomputed as a whole. The first plan recomputes all of them, like a loop with
``torch.utils.checkpoint`` around each block. `choose` goes beyond it: it keeps the last blocks as far as there is VRAM,
since backward begins with them, and offloads the first ones as far as the link hides that and there is RAM. Timed steps
tell whether that is faster (comparison.py).

The free VRAM differs from block to block (levels.py)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....core.sizes import format_bytes
from .levels import Rises

_HIDDEN = 0.9  # of compute time that transfers may take


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """Measurements of one block. Times are the device's, from the first kernel to the last: where the host launches
    kernels more slowly than the device runs them, it is the host's time."""

    forward_s: float  # a second run in backward takes as long
    input_bytes: int
    saved_bytes: int  # by autograd, if nothing is recomputed
    repeatable: bool = True  # whether it may run a second time: it changes no buffers and has no hooks


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """``kind``: "keep", "offload" or "recompute"; for the latter, ``inputs_away``: whether the inputs are offloaded."""

    kind: str
    inputs_away: bool = False

    def sent_bytes(self, profile: BlockProfile) -> int:
        """Bytes that a block of that profile offloads in forward."""
        if self.kind == "offload":
            return profile.saved_bytes
        return profile.input_bytes if self.inputs_away else 0

    def held_bytes(self, *, input_bytes: int, saved_bytes: int) -> int:
        """Bytes that such a block leaves on the device between forward and backward."""
        if self.kind == "keep":
            return saved_bytes
        return input_bytes if self.kind == "recompute" and not self.inputs_away else 0


KEEP, OFFLOAD, RECOMPUTE = (BlockPlan(kind=kind) for kind in ("keep", "offload", "recompute"))
_DONE = {"keep": "kept", "offload": "offloaded", "recompute": "recomputed"}
RECOMPUTE_FROM_RAM = BlockPlan(kind="recompute", inputs_away=True)


@dataclass(frozen=True, kw_only=True)
class ActivationPlan:
    """One plan for each block, and the reason. ``way_bytes``: VRAM for transfers in flight while backward is in each
    block; the last entry is for forward."""

    blocks: list[BlockPlan]
    reason: str
    way_bytes: list[int]
    spare_bytes: int = 0  # unused part of the room that all blocks have together

    @functools.cached_property
    def offloads(self) -> bool:
        """Whether any block does. Asked for each block of a pass."""
        return any(plan.kind == "offload" or plan.inputs_away for plan in self.blocks)

    def does_less_than(self, other: ActivationPlan) -> bool:
        """Whether it only keeps blocks for which ``other`` does something."""
        return all(plan in (KEEP, was) for plan, was in zip(self.blocks, other.blocks, strict=True))


@dataclass(frozen=True, kw_only=True)
class Means:
    """Resources for activations. The link's free rates. ``rooms``: VRAM that activations may take while backward is in
    each block and, as the last entry, when forward ends. RAM that they may take. ``rises``: bytes that each block takes
    itself while backward is in it. ``way_bytes``: most VRAM for transfers in flight."""

    rooms: Sequence[int]
    rises: Sequence[Rises]
    out_bytes_per_s: float
    in_bytes_per_s: float
    way_bytes: int = 0
    ram_bytes: int = 0


class _Draft:
    """A plan in the making, and the bytes left of each room. What a block holds counts in its own room and in those of
    all later blocks. The inputs of a recomputed block do not count in its own: they are part of what it takes itself
    (levels.py)."""

    def __init__(self, profiles: list[BlockProfile], means: Means, way_bytes: int) -> None:
        """All blocks are recomputed, with inputs on the device as far as they fit, the last ones first. A block that
        may not run again is kept where there is room, or offloaded."""
        self._profiles, self._means, self._way_bytes = profiles, means, min(means.way_bytes, way_bytes)
        self._left = [room - self._way_bytes for room in means.rooms]
        for index, rise in enumerate(means.rises):
            self._left[index] -= rise.whole
        self.blocks = [RECOMPUTE_FROM_RAM if profile.repeatable else OFFLOAD for profile in profiles]
        for index, profile in reversed(list(enumerate(profiles))):
            if not profile.repeatable:
                self._keep(index)
            elif self._take(index + 1, profile.input_bytes):
                self.blocks[index] = RECOMPUTE

    def _take(self, block: int, size: int) -> bool:
        """Let ``block`` hold ``size`` more bytes; False if there is no room."""
        if any(left < size for left in self._left[block:]):
            return False
        self._left[block:] = [left - size for left in self._left[block:]]
        return True

    def _keep(self, block: int) -> bool:
        """Keep ``block`` if there is room."""
        profile, rise, before = self._profiles[block], self._means.rises[block], self._left
        held = self.blocks[block].held_bytes(input_bytes=profile.input_bytes, saved_bytes=0)
        self._left = [*before[: block + 1], *(left + held for left in before[block + 1 :])]
        self._left[block] += rise.whole - rise.keep  # while backward is in a kept block, nothing is computed again
        if self._take(block, profile.saved_bytes):
            self.blocks[block] = KEEP
            return True
        self._left = before
        return False

    def mix(self) -> None:
        """Keep the last blocks that would be recomputed, as far as there is room, and offload the first ones, as far as
        link and RAM allow."""
        for index in reversed(range(len(self.blocks))):
            if self.blocks[index].kind == "recompute" and not self._keep(index):
                break
        link, ram = _Link(self._profiles, self._means, slack=self._way_bytes // 2), self._means.ram_bytes
        sent = [block.sent_bytes(profile) for block, profile in zip(self.blocks, self._profiles, strict=True)]
        ram -= sum(sent)
        for index, profile in enumerate(self._profiles):
            size = profile.saved_bytes
            if sent[index]:
                link.take(index, sent[index])
            elif self.blocks[index].kind == "recompute" and size <= ram and link.take(index, size):
                self.blocks[index] = OFFLOAD
                ram -= size

    def made(self, reason: str = "") -> ActivationPlan:
        """The plan. To ``reason`` comes the number of blocks that are not recomputed, where there are any."""
        counts = {kind: sum(plan.kind == kind for plan in self.blocks) for kind in _DONE}
        if not reason or counts["recompute"] < len(self.blocks):
            listed = ", ".join(f"{count} {_DONE[kind]}" for kind, count in counts.items() if count)
            more = f"; {reason}" if reason and counts["recompute"] else ""
            reason = f"{listed} of {len(self.blocks)} blocks{more}"
        spare_bytes = max(0, min(self._left, default=0))
        return ActivationPlan(blocks=self.blocks, reason=reason, way_bytes=self._ways(), spare_bytes=spare_bytes)

    def _ways(self) -> list[int]:
        """In-flight budgets by block: some bytes are still there when backward has reached the next block. The tensors
        that this one asks for first are part of what it takes itself (levels.py)."""
        rooms = [max(0, min(self._way_bytes, self._way_bytes + left)) for left in self._left]
        blocks = zip(self._profiles, self.blocks, strict=True)
        asked = [profile.input_bytes if plan.inputs_away else 0 for profile, plan in blocks]
        each = zip(rooms[1:-1], rooms, asked, strict=False)
        return [rooms[0], *(min(room, max(then, first)) for room, then, first in each), rooms[-1]]


class _Link:
    """The link out during forward. What one block sends may still be leaving while the next ones compute, as long as no
    more than ``slack`` bytes are behind; so time that a block does not fill is not lost."""

    def __init__(self, profiles: list[BlockProfile], means: Means, *, slack: int) -> None:
        rate = _HIDDEN * min(means.out_bytes_per_s, 2 * means.in_bytes_per_s)  # backward is twice as long
        self._hidden = [rate * profile.forward_s for profile in profiles]
        self._sent = [0] * len(profiles)
        self._slack = slack

    def take(self, block: int, size: int) -> bool:
        """Let ``block`` send ``size`` more bytes; False if anything would then be late."""
        self._sent[block] += size
        behind = 0.0
        for index, (hidden, sent) in enumerate(zip(self._hidden, self._sent, strict=True)):
            behind = max(0.0, behind + sent - hidden)
            if index >= block and behind > self._slack:
                self._sent[block] -= size
                return False
        return True


def recompute(profiles: list[BlockProfile], means: Means) -> ActivationPlan:
    """Recompute every block that may be, as with ``torch.utils.checkpoint`` around each. Inputs of blocks remain on the
    device as far as they fit, the last ones first; the rest is offloaded."""
    draft = _Draft(profiles, means, 2 * max((profile.input_bytes for profile in profiles), default=0))
    stay = draft.blocks.count(RECOMPUTE)
    return draft.made(f"recomputed; the inputs of {stay} of {len(profiles)} blocks stay on the device")


def choose(profiles: list[BlockProfile], means: Means, *, offload: bool = True) -> ActivationPlan:
    """The plan that should be fastest: keep what fits, offload what the link hides if wanted, recompute the rest."""
    held = list(itertools.accumulate(profile.saved_bytes for profile in profiles))
    taken = [*(size + rise.keep for size, rise in zip(held, means.rises, strict=True)), held[-1]]
    spare_bytes = min(room - size for room, size in zip(means.rooms, taken, strict=True))
    if spare_bytes >= 0:
        reason = f"kept: {format_bytes(held[-1])} of activations fit"
        blocks, ways = [KEEP] * len(profiles), [0] * len(means.rooms)
        return ActivationPlan(blocks=blocks, reason=reason, way_bytes=ways, spare_bytes=spare_bytes)
    plans = []
    for size in (max(profile.input_bytes for profile in profiles), max(profile.saved_bytes for profile in profiles)):
        draft = _Draft(profiles, means if offload else replace(means, ram_bytes=0), 2 * size)
        draft.mix()
        plans.append(draft.made())
    return min(plans, key=lambda plan: cost_s(profiles, plan))


def cost_s(profiles: list[BlockProfile], plan: ActivationPlan) -> float:
    """The time for recomputing, in seconds."""
    blocks = zip(profiles, plan.blocks, strict=True)
    return sum(profile.forward_s for profile, block in blocks if block.kind == "recompute")
