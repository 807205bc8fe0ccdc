"""Decides how large units and the pool are, as data with its reason. A simple rule, which a planner may replace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...core.errors import OutOfBudget
from ...core.plan import Division, Origin, Placement
from ...core.sizes import GiB, KiB, MiB, as_setting, format_bytes, round_down
from ...core.tags import Tier
from ...memory.books.ledger import Ledger
from .partition import Partition

_UNITS_IN_BUDGET = 6  # the pool needs room for four: two with weights, and the gradients of two


def division(limit_bytes: int, *, left_bytes: int = 0) -> Division:
    """How large units may be under a device limit; ``left_bytes``: parameters that are not streamed."""
    return Division(
        unit_bytes=limit_bytes // _UNITS_IN_BUDGET,
        left_bytes=left_bytes,
        reason=f"1/{_UNITS_IN_BUDGET} of vram: two units and the gradients of two then leave a third of it",
        origin=Origin.PLANNED,
    )


def least_pool_bytes(partition: Partition, *, training: bool) -> int:
    """The smallest pool that works: a block and the largest unit after it, with gradients in flight."""
    largest = max((unit.image_bytes for unit in partition.units), default=0)
    entry = max((sum(unit.image_bytes + 512 for unit in entry.units) for entry in partition.entries), default=0)
    bucket = max((unit.grad_bytes for unit in partition.units), default=0) + 512 if training else 0
    return entry + largest + 2 * bucket + 512


def place(
    partition: Partition,
    ledger: Ledger,
    *,
    training: bool,
    measured: bool,
    reserve_bytes: int = 0,
    enough: Callable[[], int],
) -> Placement:
    """The initial placement; see `growth` for what it becomes once activations have been ``measured``, if the device
    reports how much they take. ``enough`` gives a limit that suffices, for the error message."""
    units = partition.units
    images = sum(unit.image_bytes + 512 for unit in units)
    largest = max((unit.image_bytes for unit in units), default=0)
    bucket = max((unit.grad_bytes for unit in units), default=0) + 512 if training else 0
    wide = max((unit.wide_bytes for unit in units if unit.has_wide_form), default=0) if training else 0
    adding = 2 * (wide + 512) if wide else bucket  # to add a gradient to an earlier one
    free = round_down(ledger.free_bytes(Tier.DEVICE) - reserve_bytes, 512)
    budget = ledger.budgets[Tier.DEVICE]
    fixed = 2 * bucket + 512
    least = least_pool_bytes(partition, training=training)
    if least + adding > free * 3 // 4:
        adding = 0  # accumulation then takes it from weights, or from what activations leave
    fixed += adding
    least += adding
    whole = images + fixed
    if least > free:
        raise OutOfBudget(
            f"Cannot stream this model through {format_bytes(budget.limit_bytes)} of device memory for PARAMETERS",
            f"the largest block and the one after it, with their gradients, need {format_bytes(least)}",
            f"The limit is {budget.given}.{_meant(budget.limit_bytes)}",
            f"Raise it to at least {as_setting(enough())}; activations come on top."
            + (" An adapter (LoRA) needs about half of that." if 6 * bucket > least else ""),
        )
    if not measured or whole <= free // 8:
        pool = min(whole, free)
        why = (
            "all of it fits"
            if pool == whole
            else f"all that {budget.given} allows; the whole needs {format_bytes(whole)}"
        )
    else:
        pool = min(whole, max(least, min(5 * largest + 3 * bucket, free // 4)))
        why = f"{format_bytes(pool)} until activations have been measured; the whole needs {format_bytes(whole)}"
    return Placement(
        pool_bytes=pool,
        least_bytes=least,
        whole_bytes=whole,
        fixed_bytes=fixed,
        adding_bytes=adding,
        reason=why,
        origin=Origin.PLANNED,
    )


def _meant(limit_bytes: int) -> str:
    """A hint for a number without a unit: it means bytes, but a user who writes 8 hardly means that."""
    return f" Did you mean '{limit_bytes}GiB'?" if 0 < limit_bytes < KiB else ""


def headroom(limit_bytes: int) -> int:
    """Bytes of a budget that are left alone when the rest is given away: steps differ."""
    return max(256 * MiB, min(limit_bytes // 50, GiB))


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How to use device memory that activations have turned out to leave free.

    ``keep``: units, by index, whose optimizer states remain there; ``pool_bytes`` has room for them.
    """

    pool_bytes: int
    keep: list[int]


def growth(
    placement: Placement,
    *,
    pool_bytes: int,
    limit_bytes: int,
    peak_bytes: int,
    free_bytes: int,
    lost_bytes: int = 0,
    step_bytes: int,
    state_bytes: dict[int, int],
) -> Growth:
    """How the pool grows, given the peak of torch's allocations, the device's free memory and the bytes lost to holes.

    First room for weights, in steps worth the trouble; when all of them fit, for optimizer states, unit by unit.
    ``state_bytes``: what each unit takes that is not there yet.
    """
    left = headroom(limit_bytes)
    # Memory that the device lacks reduces both terms.
    spare = min(limit_bytes - peak_bytes - max(left, lost_bytes), free_bytes - left)
    missing = max(0, placement.whole_bytes - pool_bytes)
    if spare < missing:
        return Growth(pool_bytes=spare if spare >= step_bytes else 0, keep=[])
    more, keep = missing, []
    for index, size in state_bytes.items():
        if more + size <= spare:
            keep.append(index)
            more += size
    return Growth(pool_bytes=more, keep=keep)
