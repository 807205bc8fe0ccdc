"""Computes how much RAM a session takes when it opens, before the first byte of it is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...core.errors import OutOfBudget
from ...core.sizes import MiB, as_setting, format_bytes, round_up
from ...core.tags import Tag, Tier
from ...memory.books.ledger import Ledger
from ...memory.host.arena import PAGE, regions_for
from ...memory.lanes.flags import board_bytes
from .in_files import choose
from .unit import ALIGNMENT, Unit

_READ_BYTES = 8 * MiB
_LEAST_READS, _MOST_READS = 8, 64
_SLOTS_IN_ALL = 64  # slots are smaller where the weights in files would take fewer
_SPARE_PART = 4


@dataclass(frozen=True, kw_only=True)
class Homes:
    """RAM of a session: the regions of its arenas, in bytes. ``needed``: the part that is taken at once."""

    parameters: list[int]
    gradients: list[int]  # without an optimizer, taken when the first gradient comes; with a ring, unit by unit
    ring_bytes: int  # for gradients that an update takes at once; 0: all have homes
    states: list[int]  # of our own Adam; torch's optimizers make theirs, of unknown size
    factors_bytes: int  # for numbers that our own Adam copies to the device
    flags: int
    adam: bool  # whether our own runs
    needed: dict[Tag, int]
    in_files: list[Unit] = field(default_factory=list)  # their frozen weights remain in the model's own files
    reading: ReadRing | None = None  # RAM through which those weights pass


@dataclass(frozen=True)
class ReadRing:
    """RAM through which weights pass from files to the device: so many slots, each for one read."""

    slots: int
    slot_bytes: int

    @property
    def bytes(self) -> int:
        return self.slots * self.slot_bytes


def read_ring_for(units: Sequence[Unit], spare_bytes: int = 0) -> ReadRing:
    """The ring for the files of these units. Reads of 8 MiB are as fast as longer ones, and some must be under way
    while others are copied. A part of ``spare_bytes`` lets reads run ahead, by up to the largest unit twice."""
    sizes = [unit.image_bytes - unit.file_at for unit in units]
    slot = min(_READ_BYTES, max(PAGE, round_up(sum(sizes) // _SLOTS_IN_ALL, PAGE)))
    ahead = min(-(-2 * max(sizes, default=0) // slot), _MOST_READS, spare_bytes // _SPARE_PART // slot)
    return ReadRing(max(_LEAST_READS, ahead), slot)


def ring_bytes_for(units: list[Unit]) -> int:
    """Bytes of the ring through which gradients pass to updates in backward.

    Those of the two largest units, so that one is stored while the other is read, and at least a sixteenth of all
    (0.125 bytes a parameter in bf16), so that many small units can wait for the CPU without holding up backward."""
    sizes = sorted(unit.grad_bytes for unit in units)
    return max(sum(sizes[-2:]), round_up(sum(sizes) // 16, ALIGNMENT))


def homes_for(
    units: list[Unit], ledger: Ledger, *, optimizer: bool, adam: bool, in_backward: bool, always_ring: bool = False
) -> Homes:
    """Sizes of the units' home memory; raises if ``ram`` does not allow all of it.

    ``in_backward``: the optimizer updates each unit as soon as its gradients are complete. They then pass through a
    ring, if RAM has no room for all of them: with all, the CPU may still update during the next forward. For tests:
    ``always_ring``. Counts only what is certain to be taken: no activations, no sums of micro-batches, no staging ring
    for want of page-locks."""
    sizes = [size for unit in units for size in (unit.state_count * 4, unit.state_count * 4, unit.master_bytes)]
    flags = sum(1 + len(unit.trained) for unit in units)
    homes = Homes(
        parameters=regions_for(unit.image_bytes for unit in units),
        gradients=regions_for(unit.grad_bytes for unit in units),
        ring_bytes=0,
        states=regions_for(sizes),
        factors_bytes=round_up(64 * 64, PAGE),
        flags=flags,
        adam=adam,
        needed={},
    )
    homes.needed[Tag.PARAMETERS] = sum(homes.parameters)
    homes.needed[Tag.GRADIENTS] = sum(homes.gradients) if optimizer else 0
    homes.needed[Tag.OPTIMIZER] = sum(homes.states) if adam else 0
    homes.needed[Tag.STAGING] = board_bytes(flags) + (homes.factors_bytes if adam else 0)
    is_short = sum(homes.needed.values()) > ledger.free_bytes(Tier.HOST)
    if optimizer and in_backward and (is_short or always_ring):
        homes = replace(homes, ring_bytes=ring_bytes_for(units))
        homes.needed[Tag.GRADIENTS] = round_up(homes.ring_bytes, PAGE)
    homes = _with_files(homes, units, ledger.free_bytes(Tier.HOST))
    total = sum(homes.needed.values())
    if total > ledger.free_bytes(Tier.HOST):
        budget = ledger.budgets[Tier.HOST]
        parts = ", ".join(f"{tag.name} {format_bytes(size)}" for tag, size in homes.needed.items() if size)
        raise OutOfBudget(
            f"Cannot hold this model in {format_bytes(budget.limit_bytes)} of RAM",
            f"{format_bytes(total)} are needed, {total} bytes: {parts}",
            f"The limit is {budget.given}{f' ({budget.reason})' if budget.reason else ''}.",
            f"Raise it to at least {as_setting(total)}, or train an adapter (LoRA) instead of all weights."
            if optimizer
            else f"Raise it to at least {as_setting(total)}, or take a smaller model.",
        )
    return homes


def _with_files(homes: Homes, units: Sequence[Unit], free_bytes: int) -> Homes:
    """``homes``, where as many units leave their frozen weights in files as RAM has no room for."""

    def left_in_files(chosen: Sequence[Unit], spare_bytes: int = 0) -> Homes:
        if not chosen:
            return homes
        ring, away = read_ring_for(chosen, spare_bytes), {unit.index for unit in chosen}
        in_ram = regions_for(unit.file_at if unit.index in away else unit.image_bytes for unit in units)
        flags = homes.flags + 2 * ring.slots
        staging = homes.needed[Tag.STAGING] - board_bytes(homes.flags) + board_bytes(flags) + round_up(ring.bytes, PAGE)
        needed = {**homes.needed, Tag.PARAMETERS: sum(in_ram), Tag.STAGING: staging}
        return replace(homes, parameters=in_ram, flags=flags, needed=needed, in_files=list(chosen), reading=ring)

    def spare(chosen: Sequence[Unit]) -> int:
        return free_bytes - sum(left_in_files(chosen).needed.values())

    chosen = choose(units, lambda some: spare(some) >= 0)
    return left_in_files(chosen, max(0, spare(chosen)))
