"""Computes how much RAM a session takes when it opens, before the first byte of it is taken."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import OutOfBudget
from ...core.sizes import as_setting, format_bytes, round_up
from ...core.tags import Tag, Tier
from ...memory.books.ledger import Ledger
from ...memory.host.arena import PAGE, regions_for
from ...memory.lanes.flags import board_bytes
from .unit import Unit


@dataclass(frozen=True, kw_only=True)
class Homes:
    """RAM of a session: the regions of its arenas, in bytes. ``needed``: the part that is taken at once."""

    parameters: list[int]
    gradients: list[int]  # without an optimizer, taken when the first gradient comes
    states: list[int]  # of our own Adam; torch's optimizers make theirs, of unknown size
    factors_bytes: int  # for numbers that our own Adam copies to the device
    flags: int
    adam: bool  # whether our own runs
    needed: dict[Tag, int]


def homes_for(units: list[Unit], ledger: Ledger, *, optimizer: bool, adam: bool) -> Homes:
    """Sizes of the units' home memory; raises if ``ram`` does not allow all of it.

    Counts only what is certain to be taken: no activations, no sums of micro-batches, no staging ring for want of
    page-locks."""
    sizes = [size for unit in units for size in (unit.state_count * 4, unit.state_count * 4, unit.master_bytes)]
    flags = sum(1 + len(unit.trained) for unit in units)
    homes = Homes(
        parameters=regions_for(unit.image_bytes for unit in units),
        gradients=regions_for(unit.grad_bytes for unit in units),
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
