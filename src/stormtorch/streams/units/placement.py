"""Decides how large units and the pool are, as data with its reason. A simple rule, which a planner may replace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...core.errors import OutOfBudget
from ...core.plan import Division, Origin, Placement
from ...core.sizes import GiB, KiB, MiB, as_setting, format_bytes, round_down
from ...core.tags import Tier
from ...memory.books.ledger import Ledger
from .partition import Partition
from .unit import Unit

_GRAIN = 512  # bytes that the pool may lose to alignment, for each piece
_PARTS = 8  # at most so many parts for the gradients of the largest unit
# How many units a budget has room for. The pool needs four: two with weights, and the gradients of two. The numbers
# after the first are for budgets in which such units do not fit.
UNITS_IN_BUDGET = (6, 9, 13, 20, 1000)


def division(limit_bytes: int, parts: int = UNITS_IN_BUDGET[0]) -> Division:
    """How large units may be under a device limit."""
    usual = parts == UNITS_IN_BUDGET[0]
    why = "two units and the gradients of two then leave a third of it" if usual else "larger units do not fit"
    return Division(
        unit_bytes=limit_bytes // parts, left_bytes=0, reason=f"1/{parts} of vram: {why}", origin=Origin.PLANNED
    )


@dataclass(frozen=True, kw_only=True)
class Room:
    """The parts of the smallest pool: for weights, and for each of the two buckets of gradients."""

    weights: int
    bucket: int
    wide: int  # a bucket's gradients in fp32; 0 if they have no such form

    @property
    def fixed(self) -> int:
        return 2 * self.bucket + _GRAIN

    @property
    def least(self) -> int:
        return self.weights + self.fixed


@dataclass(frozen=True, eq=False)
class Cut:
    """A model in units, and the pool that they need."""

    partition: Partition
    room: Room
    division: Division

    @property
    def whole_bytes(self) -> int:
        """The pool that holds all weights."""
        return sum(unit.image_bytes + _GRAIN for unit in self.partition.units) + self.room.fixed

    @property
    def least_bytes(self) -> int:
        """The smallest pool that works."""
        return min(self.room.least, self.whole_bytes)


def _roomy(partition: Partition, *, training: bool) -> Room:
    """A block, those around it and the largest unit after it, with the gradients of any two units in flight."""
    units = partition.units
    largest = max((unit.image_bytes for unit in units), default=0)
    entry = _at_once(partition)
    bucket = max((unit.grad_bytes for unit in units), default=0) + _GRAIN
    wide = max((unit.wide_bytes for unit in units if unit.has_wide_form), default=0)
    return Room(weights=entry + largest, bucket=bucket if training else 0, wide=wide if training else 0)


def _narrow(partition: Partition, *, training: bool) -> Room:
    """For units that are much larger than the blocks, such as the tables of a large vocabulary: one of them and a
    block. Their gradients pass through buckets for blocks, part by part."""
    units = partition.units
    blocks = [unit for unit in units if unit not in partition.large] or units
    block = max((unit.image_bytes for unit in blocks), default=0)
    largest = max((unit.grad_bytes for unit in units), default=0)
    bucket = max([largest // _PARTS, *(unit.grad_bytes for unit in blocks)]) + _GRAIN
    wide = max((unit.wide_bytes for unit in blocks if unit.has_wide_form), default=0)
    weights = _at_once(partition) + block
    return Room(weights=weights, bucket=bucket if training else 0, wide=wide if training else 0)


def room_for(divided: Division, parted: Callable[..., Partition], free_bytes: int) -> Cut:
    """A model in units of that size, as ``parted`` gives them, and the parts of the pool. Blocks are cut ``small``
    where a roomy pool would be more than half of ``free_bytes``."""
    partition = parted(divided.unit_bytes)
    training = any(unit.trained for unit in partition.units)
    left_bytes = sum(parameter.nbytes for parameter in partition.left)
    cut = Cut(partition, _roomy(partition, training=training), replace(divided, left_bytes=left_bytes))
    if cut.room.least > free_bytes // 2 and cut.whole_bytes > free_bytes:
        other = parted(divided.unit_bytes, small=True)
        narrow = Cut(other, _narrow(other, training=training), cut.division)
        if narrow.least_bytes < cut.least_bytes:
            return narrow
    return cut


def _at_once(partition: Partition) -> int:
    """The most bytes of weights that modules use at once: of one and of those around it."""
    around: dict[int, set[Unit]] = {id(entry.module): set() for entry in partition.entries}
    for entry in partition.entries:
        for module in entry.module.modules():
            if id(module) in around:
                around[id(module)].update(entry.units)
    return max((sum(unit.image_bytes + _GRAIN for unit in units) for units in around.values()), default=0)


def place(cut: Cut, ledger: Ledger, *, measured: bool, reserve_bytes: int = 0, enough: Callable[[], int]) -> Placement:
    """The initial placement; see `growth` for what it becomes once activations have been ``measured``, if the device
    reports how much they take. ``enough`` gives a limit that suffices, for the error message."""
    units, room = cut.partition.units, cut.room
    largest = max((unit.image_bytes for unit in units), default=0)
    free = round_down(ledger.free_bytes(Tier.DEVICE) - reserve_bytes, _GRAIN)
    budget = ledger.budgets[Tier.DEVICE]
    adding = 2 * (room.wide + _GRAIN) if room.wide else room.bucket  # to add a gradient to an earlier one
    if room.least + adding > free * 3 // 4:
        adding = 0  # accumulation then takes it from weights, or from what activations leave
    fixed, least, whole = room.fixed + adding, cut.least_bytes + adding, cut.whole_bytes + adding
    if least > free:
        raise OutOfBudget(
            f"Cannot stream this model through {format_bytes(budget.limit_bytes)} of device memory for PARAMETERS",
            f"the largest block and the one after it, with their gradients, need {format_bytes(least)}",
            f"The limit is {budget.given}.{_meant(budget.limit_bytes)}",
            f"Raise it to at least {as_setting(enough())}; activations come on top."
            + (" An adapter (LoRA) needs about half of that." if 6 * room.bucket > least else ""),
        )
    if not measured or whole <= free // 8:
        pool = min(whole, free)
        why = (
            "all of it fits"
            if pool == whole
            else f"all that {budget.given} allows; the whole needs {format_bytes(whole)}"
        )
    else:
        pool = min(whole, max(least, min(5 * largest + 3 * room.bucket, free // 4)))
        why = f"{format_bytes(pool)} until activations have been measured; the whole needs {format_bytes(whole)}"
    return Placement(
        pool_bytes=pool,
        least_bytes=least,
        whole_bytes=whole,
        fixed_bytes=fixed,
        adding_bytes=adding,
        bucket_bytes=max(0, room.bucket - _GRAIN),
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
