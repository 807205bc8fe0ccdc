"""What becomes of each block's activations until backward: decided in one place, from measurements, as data.

Two things are for free while compute runs: the link, in both directions, and what VRAM the rest leaves. What they
cannot take is computed again. The results of a block's operations are ranked by the time that a byte of them saves
(tape.py); the link and the VRAM are filled with the best.

What is left of VRAM differs from block to block (levels.py). Where not even one recomputed block fits, it is recomputed
in parts, child by child: then only the largest part's activations are there at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..core.sizes import format_bytes
from .levels import Rises, Way
from .tape import Operation, Tape

_HIDDEN = 0.95  # of the time that compute gives the link
_WORTH_WAITING = 1.5  # a result that compute has to wait for saves so many times that
_CUTS = (0.5, 0.0, None)  # shares of what may travel that make way for a whole block; None: no block is whole


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """One block, measured."""

    forward_s: float
    input_bytes: int
    saved_bytes: int  # by autograd, if nothing is recomputed
    operations: dict[Operation, tuple[int, float]] = field(default_factory=dict)  # bytes of the result, seconds saved
    tape: Tape = field(default_factory=Tape)
    parts: dict[str, int] = field(default_factory=dict)  # children by name, with what was saved inside of them
    part_operations: dict[str, dict[Operation, tuple[int, float]]] = field(default_factory=dict)  # if each is by itself
    between_bytes: int = 0  # saved outside of parts, or given to one
    leads: dict[str, str] = field(default_factory=dict)  # to a part: a child that makes what it is given, and is cheap
    led_bytes: int = 0  # saved outside of parts, or given to one that nobody leads to
    repeatable: bool = True  # whether it may be run a second time: it changes no buffers, and nobody is listening

    def results(self, parts: tuple[str, ...]) -> dict[Operation, tuple[int, float]]:
        """What is worth putting aside if the block is recomputed in these parts, or without any as a whole."""
        if not parts:
            return self.operations
        return {name: result for part in parts for name, result in self.part_operations.get(part, {}).items()}


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """``kind``: "keep", "offload" or "recompute". When recomputing: whether the block's inputs leave, and which results
    of its operations survive, in RAM (True) or in VRAM (False). And in which ``parts``, if not as a whole: what is
    saved outside of them then leaves, and results survive in RAM only."""

    kind: str
    inputs_away: bool = False
    results_away: dict[Operation, bool] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    led: bool = False  # what parts are given is made again where a child leads to them

    def way(self, parts: Mapping[str, int]) -> Way:
        """How a block with these parts gets through backward."""
        if self.kind == "recompute":
            return "whole" if not self.parts else "parts" if self.parts == tuple(parts) else "other"
        return "keep" if self.kind == "keep" else "other"

    def sent_bytes(self, profile: BlockProfile) -> int:
        """What leaves a block of that profile in forward."""
        if self.kind != "recompute":
            return profile.saved_bytes if self.kind == "offload" else 0
        results = sum(profile.results(self.parts)[name][0] for name, away in self.results_away.items() if away)
        if not self.parts:
            return results + (profile.input_bytes if self.inputs_away else 0)
        others = sum(size for part, size in profile.parts.items() if part not in self.parts)
        return results + others + max(profile.input_bytes, profile.led_bytes if self.led else profile.between_bytes)

    def held_bytes(
        self, *, input_bytes: int, saved_bytes: int, operations: Mapping[Operation, tuple[int, float]]
    ) -> int:
        """What a block of which this is known leaves on the device between forward and backward."""
        if self.kind == "keep":
            return saved_bytes
        if self.kind == "offload":
            return 0
        kept = sum(operations[name][0] for name, away in self.results_away.items() if not away)
        return kept + (0 if self.inputs_away else input_bytes)


KEEP, OFFLOAD = BlockPlan(kind="keep"), BlockPlan(kind="offload")


@dataclass(frozen=True, kw_only=True)
class ActivationPlan:
    """One plan for each block, and why. ``way_bytes``: of VRAM, by block, for what is on its way while backward is
    there; the last entry is for forward."""

    blocks: list[BlockPlan]
    reason: str
    way_bytes: list[int]
    spare_bytes: int = 0  # what is left of the room that all blocks together have


@dataclass(frozen=True, kw_only=True)
class Means:
    """What there is to use: the link's free rates; of VRAM, for each block, what activations may take while backward is
    there, and as the last entry when forward ends. ``rises``: what each block takes itself while backward is in it.
    ``way_bytes`` at most are for what travels."""

    rooms: Sequence[int]
    rises: Sequence[Rises]
    out_bytes_per_s: float
    in_bytes_per_s: float
    way_bytes: int = 0


class _Rooms:
    """What is left of each room. What a block holds counts in its own and in those of all that come after it; but the
    inputs of one that is recomputed not in its own: they are among what it takes itself (levels.py).

    The last block is kept if it has room: backward begins with it. ``early`` are all others."""

    def __init__(
        self,
        means: Means,
        profiles: list[BlockProfile],
        *,
        way_bytes: int,
        keep: bool = False,
        keep_last: bool = True,
    ) -> None:
        """``keep``: all blocks are meant to be kept, not recomputed; ``keep_last``: the last one is, if it can."""
        self.way_bytes = way_bytes
        self.left = [room - way_bytes for room in means.rooms]
        rises = [rise.keep if keep else rise.whole for rise in means.rises]
        for index in range(len(profiles)):
            self.left[index] -= rises[index]
        self.early = profiles
        if profiles:
            last = len(profiles) - 1
            self.left[last] += rises[last] - means.rises[last].keep
            if keep_last and self.take(last, profiles[last].saved_bytes):
                self.early = profiles[:last]
            else:
                self.left[last] += means.rises[last].keep - rises[last]

    def take(self, block: int, size: int) -> bool:
        """Whether ``block`` may hold ``size`` more bytes, which it then does."""
        if any(left < size for left in self.left[block:]):
            return False
        self.left[block:] = [left - size for left in self.left[block:]]
        return True

    def take_inputs(self, block: int, size: int) -> bool:
        """The same for the inputs of a block that is recomputed."""
        return self.take(block + 1, size)

    def ways(self) -> list[int]:
        """What may be on its way at each block: what was set aside for it, as far as it is there."""
        return [max(0, min(self.way_bytes, self.way_bytes + left)) for left in self.left]


class _Link:
    """The way out during forward. What one block sends may still be leaving while the next ones compute, as long as no
    more than ``slack`` bytes are behind; so what a block does not fill of its own time is not lost."""

    def __init__(self, profiles: list[BlockProfile], means: Means, *, slack: int) -> None:
        self._hidden = [_hidden_bytes(profile, means) for profile in profiles]
        self._sent = [0] * len(profiles)
        self._behind = [0.0] * max(0, len(profiles) - 1)  # when the block ends; what is beyond the slack is waited for
        self._slack = slack

    def take(self, block: int, size: int) -> bool:
        """Whether ``block`` may send ``size`` more bytes without being late for it, which it then does."""
        behind = self._behind_with(block, size)
        is_late = any(
            more > max(before, self._slack) for more, before in zip(behind, self._behind[block:], strict=False)
        )
        if is_late or (block == len(self._behind) and size > 0):
            return False
        self.force(block, size)
        return True

    def force(self, block: int, size: int) -> None:
        """Send, hidden or not."""
        behind = self._behind_with(block, size)
        self._behind[block : block + len(behind)] = behind
        self._sent[block] += size

    def late_bytes(self) -> float:
        """What compute would wait for. What leaves the last block is wanted at once."""
        return sum(self._sent[-1:]) + sum(max(0.0, behind - self._slack) for behind in self._behind)

    def _behind_with(self, block: int, size: int) -> list[float]:
        """What is behind with ``size`` more, at ``block`` and the next ones, as far as it makes a difference."""
        changed: list[float] = []
        behind = self._behind[block - 1] if block else 0.0
        for index in range(block, len(self._behind)):
            behind = max(0.0, min(behind, self._slack) + self._sent[index] + size - self._hidden[index])
            if behind == self._behind[index]:
                break
            changed.append(behind)
            size = 0
        return changed


class _Early:
    """What blocks that are recomputed want all at once, when backward comes to them: their inputs and the results that
    are away, each part by itself. As much of it as has room on its way comes early, behind the block before."""

    def __init__(self, profiles: list[BlockProfile], blocks: Sequence[BlockPlan], rooms: Sequence[int]) -> None:
        """``rooms``: for what is on its way, while backward is in each block, and last at the end of forward."""
        self._profiles, self._blocks, self._rooms = profiles, blocks, rooms
        # Parts after the first are fetched while backward is in the block itself.
        self._ways = [min(rooms[index + (not plan.parts) : index + 2]) for index, plan in enumerate(blocks)]
        self._wanted: list[dict[str, int]] = []
        for index, (profile, plan) in enumerate(zip(profiles, blocks, strict=False)):
            inputs = profile.input_bytes if plan.kind == "recompute" and plan.inputs_away else 0
            self._wanted.append(dict.fromkeys(plan.parts or ("",), inputs))
            for name, away in plan.results_away.items():
                if away:
                    self.add(index, name)

    def late_with(self, block: int, operation: Operation) -> int:
        """How much more compute would wait for if that result were away."""
        room = self._ways[block] - self._wanted[block][self._part(block, operation)]
        return max(0, self._size(block, operation) - max(0, room))

    def add(self, block: int, operation: Operation) -> None:
        self._wanted[block][self._part(block, operation)] += self._size(block, operation)

    def late_bytes(self) -> int:
        """What compute would wait for."""
        each = zip(self._wanted, self._ways, strict=True)
        return sum(max(0, wanted - way) for parts, way in each for wanted in parts.values())

    def ways(self) -> list[int]:
        """What may be on its way at each block, given that some of it is still there when backward has got to the next.
        But what that one asks for first is among what it takes itself (levels.py)."""
        first = [[*parts.values()][-1] for parts in self._wanted]  # parts run in order, and backwards in backward
        each = zip(self._rooms[1:-1], self._rooms, first, strict=False)
        return [self._rooms[0], *(min(room, max(then, asked)) for room, then, asked in each), self._rooms[-1]]

    def _size(self, block: int, operation: Operation) -> int:
        return self._profiles[block].results(self._blocks[block].parts)[operation][0]

    def _part(self, block: int, operation: Operation) -> str:
        known = self._profiles[block].part_operations
        return next((part for part in self._blocks[block].parts if operation in known.get(part, ())), "")


def gain_of(parts: Mapping[str, int]) -> int:
    """How much less is on the device at a time if a block is recomputed in these parts."""
    return sum(parts.values()) - max(parts.values(), default=0)


def leanest(*, repeatable: bool, parts: dict[str, int]) -> BlockPlan:
    """What takes little VRAM, whatever it costs."""
    return BlockPlan(kind="recompute", inputs_away=True, parts=tuple(parts)) if repeatable else OFFLOAD


def recompute(profiles: list[BlockProfile], means: Means) -> ActivationPlan:
    """For ``activations="recompute"``: inputs of blocks stay on the device as far as they fit, the last ones first."""
    return _fastest(profiles, means, _all_recomputed)


def _all_recomputed(profiles: list[BlockProfile], means: Means, keep_last: bool, cut: float | None) -> ActivationPlan:
    largest = max((profile.input_bytes for profile in profiles), default=0)
    rooms = _Rooms(means, profiles, way_bytes=min(means.way_bytes, 2 * largest), keep_last=keep_last)
    blocks = _recomputed(means, rooms, cut)
    stay = 0
    for index, profile in reversed(list(enumerate(rooms.early))):
        if (
            blocks[index].kind == "recompute"
            and not blocks[index].parts
            and rooms.take_inputs(index, profile.input_bytes)
        ):
            blocks[index] = replace(blocks[index], inputs_away=False)
            stay += 1
    reason = f"recomputed; the inputs of {stay} of {len(profiles)} blocks stay on the device"
    return _made(profiles, blocks, reason, rooms)


def _fastest(
    profiles: list[BlockProfile],
    means: Means,
    make: Callable[[list[BlockProfile], Means, bool, float | None], ActivationPlan],
) -> ActivationPlan:
    """With the last block kept, which saves computing it again, or without: what it holds is there while the loss is
    computed, which often takes most, and might hold more of others' in its place. And with more or fewer blocks in
    parts, which take less VRAM, but send more."""
    cuts = _CUTS if any(profile.parts for profile in profiles) else _CUTS[:1]
    plans = [make(profiles, means, keep_last, cut) for cut in cuts for keep_last in (True, False)]
    return min(plans, key=lambda plan: cost_s(profiles, plan, means))


def cost_s(profiles: list[BlockProfile], plan: ActivationPlan, means: Means) -> float:
    """The time for computing again, and for what travels and is not hidden; of a link that has nothing left, years."""
    seconds, link = 0.0, _Link(profiles, means, slack=_slack(plan.way_bytes[-1]))
    early = _Early(profiles, plan.blocks, plan.way_bytes)
    for index, (profile, block) in enumerate(zip(profiles, plan.blocks, strict=True)):
        if block.kind == "recompute":
            results = profile.results(block.parts)
            seconds += max(0.0, profile.forward_s - sum(results[name][1] for name in block.results_away))
        link.force(index, block.sent_bytes(profile))
    seconds += link.late_bytes() / max(min(means.out_bytes_per_s, 2 * means.in_bytes_per_s), 1.0)
    return seconds + early.late_bytes() / max(means.in_bytes_per_s, 1.0)


def _slack(way_bytes: int) -> int:
    """Half of what may travel: the other half is what the block that computes sends meanwhile."""
    return way_bytes // 2


def choose(profiles: list[BlockProfile], means: Means) -> ActivationPlan:
    """For ``activations="auto"``."""
    rooms = _Rooms(means, profiles, way_bytes=0, keep=True)
    if all(rooms.take(index, profile.saved_bytes) for index, profile in enumerate(rooms.early)):
        saved = sum(profile.saved_bytes for profile in profiles)
        return _made(profiles, [KEEP] * len(profiles), f"kept: {format_bytes(saved)} of activations fit", rooms)
    rooms = _Rooms(means, profiles, way_bytes=means.way_bytes)
    hidden = [_hidden_bytes(profile, means) for profile in profiles]
    if all(profile.saved_bytes <= room for profile, room in zip(rooms.early, hidden, strict=False)):
        saved = sum(profile.saved_bytes for profile in rooms.early)
        compute_s = sum(profile.forward_s for profile in rooms.early)
        reason = f"offloaded: {format_bytes(saved)} leave behind {compute_s * 1e3:.0f} ms of forward"
        return _made(profiles, [OFFLOAD] * len(rooms.early), reason, rooms)
    return _fastest(profiles, means, _mixed)


def _hidden_bytes(profile: BlockProfile, means: Means) -> float:
    """What the link moves out while the block computes forward, and in again while it computes backward."""
    return _HIDDEN * profile.forward_s * min(means.out_bytes_per_s, 2 * means.in_bytes_per_s)


def _made(profiles: list[BlockProfile], early: list[BlockPlan], reason: str, rooms: _Rooms) -> ActivationPlan:
    blocks = [*early, *[KEEP] * (len(profiles) - len(early))]
    return ActivationPlan(
        blocks=blocks,
        reason=reason,
        way_bytes=_Early(profiles, blocks, rooms.ways()).ways(),
        spare_bytes=max(0, min(rooms.left, default=0)),
    )


def _recomputed(means: Means, rooms: _Rooms, cut: float | None) -> list[BlockPlan]:
    """All blocks recomputed, with nothing left on the device. In parts where a whole block has no room beside everybody
    else's, and beside what may travel but for a share of ``cut``. Where a block's largest part has no room either, or a
    block without parts, its activations come back one by one. Rooms grow by that."""
    blocks: list[BlockPlan] = []
    for index, profile in enumerate(rooms.early):
        has_room = cut is not None and rooms.left[index] + cut * rooms.way_bytes >= 0
        if not profile.parts:  # nor anything to cut
            has_room = rooms.left[index] + rooms.way_bytes >= 0
        if not profile.repeatable or has_room:
            blocks.append(leanest(repeatable=profile.repeatable, parts={}))
            continue
        parts = dict(profile.parts)
        rooms.left[index] += means.rises[index].whole - means.rises[index].parts
        if rooms.left[index] + rooms.way_bytes < 0:
            largest = max(parts, key=lambda part: parts[part], default="")
            rooms.left[index] += parts.pop(largest, profile.saved_bytes) // 2  # some of it is needed at a time
        # What a part's inputs are made from is beside them then, until backward has been through it.
        led = bool(parts and profile.leads) and rooms.left[index] + rooms.way_bytes // 2 >= profile.input_bytes
        rooms.left[index] -= profile.input_bytes if led else 0
        blocks.append(replace(leanest(repeatable=bool(parts), parts=parts), led=led))
    return blocks


def _mixed(profiles: list[BlockProfile], means: Means, keep_last: bool, cut: float | None) -> ActivationPlan:
    """Recompute, but for the results that the link hides or that VRAM holds: best first, and in VRAM the last blocks'
    first, which are needed first."""
    largest = max(profile.input_bytes for profile in profiles)  # leaves for want of VRAM, hidden or not
    hidden = max(_hidden_bytes(profile, means) for profile in profiles)
    way_bytes = min(means.way_bytes, 2 * max(largest, round(hidden)))
    rooms = _Rooms(means, profiles, way_bytes=way_bytes, keep_last=keep_last)
    blocks = _recomputed(means, rooms, cut)
    link = _Link(profiles, means, slack=_slack(rooms.ways()[-1]))
    for index, profile in reversed(list(enumerate(rooms.early))):
        if not profile.repeatable:
            blocks[index] = _offloaded_or_kept(index, profile, means, rooms, link)
            continue
        if blocks[index].kind != "recompute" or blocks[index].parts:
            link.force(index, blocks[index].sent_bytes(profile))
            continue
        if link.take(index, profile.input_bytes):
            continue
        if rooms.take_inputs(index, profile.input_bytes):
            blocks[index] = replace(blocks[index], inputs_away=False)
        else:
            link.force(index, profile.input_bytes)
    blocks = _with_results(means, rooms, link, blocks)
    return _made(profiles, blocks, _why(rooms.early, blocks), rooms)


def _offloaded_or_kept(block: int, profile: BlockProfile, means: Means, rooms: _Rooms, link: _Link) -> BlockPlan:
    """For a block that may not be run again: kept where the link does not hide it and there is room."""
    if link.take(block, profile.saved_bytes):
        return OFFLOAD
    gain = means.rises[block].whole - means.rises[block].keep  # room for what would have come back
    rooms.left[block] += gain
    if rooms.take(block, profile.saved_bytes):
        return KEEP
    rooms.left[block] -= gain
    link.force(block, profile.saved_bytes)
    return OFFLOAD


def _with_results(means: Means, rooms: _Rooms, link: _Link, blocks: list[BlockPlan]) -> list[BlockPlan]:
    early = _Early(rooms.early, blocks, rooms.ways())
    known = [profile.results(plan.parts) for profile, plan in zip(rooms.early, blocks, strict=True)]
    ranked = sorted(
        (size / max(seconds, 1e-9), -index, operation)
        for index, plan in enumerate(blocks)
        if plan.kind == "recompute"
        for operation, (size, seconds) in known[index].items()
    )
    results: list[dict[Operation, bool]] = [{} for _ in blocks]
    for _, negative, operation in ranked:
        block = -negative
        size, seconds = known[block][operation]
        is_worth_it = seconds * means.in_bytes_per_s >= _WORTH_WAITING * early.late_with(block, operation)
        if size <= rooms.way_bytes and is_worth_it and link.take(block, size):
            early.add(block, operation)
            results[block][operation] = True
        elif not blocks[block].parts and rooms.take(block, size):
            results[block][operation] = False
    return [replace(plan, results_away=kept) for plan, kept in zip(blocks, results, strict=True)]


def _why(early: list[BlockProfile], blocks: list[BlockPlan]) -> str:
    survive = {True: 0, False: 0}
    saved_s = 0.0
    for profile, plan in zip(early, blocks, strict=True):
        for operation, away in plan.results_away.items():
            size, seconds = profile.results(plan.parts)[operation]
            survive[away] += size
            saved_s += seconds
    whole_s = sum(seconds for profile in early for _, seconds in profile.operations.values())
    in_parts = sum(bool(plan.parts) for plan in blocks)
    offloaded, kept = blocks.count(OFFLOAD), blocks.count(KEEP)
    if offloaded + kept == len(blocks):
        because = "for want of VRAM" if any(profile.repeatable for profile in early) else "they may not be run again"
        return f"{offloaded} of {len(blocks)} blocks offloaded, {kept} kept: {because}"
    return (
        f"recomputed, but for {saved_s * 1e3:.1f} of {whole_s * 1e3:.1f} ms: "
        f"{format_bytes(survive[True])} of results in RAM, as the link hides, {format_bytes(survive[False])} in VRAM"
        + (f"; {in_parts} of {len(blocks)} blocks in parts, for want of VRAM" if in_parts else "")
        + (f"; {offloaded} of them offloaded instead" if offloaded else "")
        + (f"; {kept} kept that may not be run again" if kept else "")
    )
