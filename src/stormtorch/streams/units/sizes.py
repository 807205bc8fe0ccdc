"""Computes how much RAM a session takes when it opens, before the first byte of it is taken."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...core.errors import OutOfBudget
from ...core.sizes import MiB, as_setting, format_bytes, round_up
from ...core.tags import Tag, Tier
from ...memory.books.ledger import Ledger
from ...memory.host.arena import PAGE, regions_for
from ...memory.lanes.flags import board_bytes
from .file_layout import PAGE as FILE_PAGE
from .file_layout import FileLayout, layout_of, memory_bytes
from .in_files import InFiles, choose, left_in_files
from .unit import ALIGNMENT, Unit

FILE_THREADS = 6  # two read, two write and one updates, on average; one is spared
_MOST_CHUNK = 4 << 20  # elements: 16 MiB in one access have a disk's full rate
_LEAST_CHUNK = 1 << 15
_RAM_PART = 16  # of the RAM budget that chunks on their way take at most


@dataclass(frozen=True, kw_only=True)
class OnDisk:
    """The units whose optimizer states lie in scratch files, by index, perhaps with their weights, and the RAM through
    which updates of these pass."""

    layouts: dict[int, FileLayout] = field(default_factory=dict)
    thread_bytes: int = 0  # of each thread

    @property
    def states_bytes(self) -> int:
        return sum(size for layout in self.layouts.values() for size in layout.regions)

    @property
    def weights(self) -> dict[int, int]:
        """The bytes of the weights that lie there, by unit."""
        return {index: layout.weights_bytes for index, layout in self.layouts.items() if layout.weights_bytes}

    @property
    def disk_bytes(self) -> int:
        return self.states_bytes + sum(self.weights.values())

    @property
    def ram_bytes(self) -> int:
        return round_up(FILE_THREADS * self.thread_bytes, PAGE) if self.layouts else 0

    @property
    def flags(self) -> int:
        """Two for each chunk: its update is done; it is back in its file."""
        return sum(2 * len(layout.chunks) for layout in self.layouts.values())


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
    on_disk: OnDisk
    in_files: InFiles
    needed: dict[Tag, int]


def ring_bytes_for(units: list[Unit]) -> int:
    """Bytes of the ring through which gradients pass to updates in backward.

    Those of the two largest units, so that one is stored while the other is read, and at least a sixteenth of all
    (0.125 bytes a parameter in bf16), so that many small units can wait for the CPU without holding up backward."""
    sizes = sorted(unit.grad_bytes for unit in units)
    return max(sum(sizes[-2:]), round_up(sum(sizes) // 16, ALIGNMENT))


def homes_for(
    units: list[Unit],
    ledger: Ledger,
    *,
    optimizer: bool,
    adam: bool,
    in_backward: bool,
    always_ring: bool = False,
    disk: bool = False,
    disk_part: float = 0.0,
    weights_part: float = 0.0,
) -> Homes:
    """Sizes of the units' home memory; raises if ``ram`` does not allow all of it.

    ``in_backward``: the optimizer updates each unit as soon as its gradients are complete. They then pass through a
    ring, if RAM has no room for all of them: with all, the CPU may still update during the next forward. ``disk``: as
    far as RAM is short, frozen weights remain in the model's own files; if it still is, states lie in scratch files,
    and at last trained weights too. For tests: ``always_ring``, and ``disk_part`` of the units' states there in any
    case, or ``weights_part`` of their weights. Counts only what is certain to be taken: no activations, no sums of
    micro-batches, no staging ring for want of page-locks."""
    free = ledger.free_bytes(Tier.HOST)
    homes = _homes(units, OnDisk(), optimizer=optimizer, adam=adam)
    has_ring = optimizer and in_backward and (sum(homes.needed.values()) > free or always_ring)

    def made(on_disk: OnDisk, in_files: InFiles) -> Homes:
        homes = _homes(units, on_disk, optimizer=optimizer, adam=adam, in_files=in_files)
        return _with_ring(homes, units) if has_ring else homes

    def with_weights(on_disk: OnDisk) -> Homes:
        frozen = [u for u in units if u in in_files.units or (u.index in on_disk.weights and u.file_at < u.image_bytes)]
        scratch = list(on_disk.weights.values())
        homes = made(on_disk, left_in_files(frozen, scratch=scratch))
        left = max(0, free - sum(homes.needed.values()))
        return made(on_disk, left_in_files(frozen, left, scratch=scratch))

    def spare(some: Sequence[Unit]) -> int:
        return free - sum(made(OnDisk(), left_in_files(some)).needed.values())

    in_files = InFiles()
    if disk:
        chosen = choose(units, lambda some: spare(some) >= 0)
        in_files = left_in_files(chosen, max(0, spare(chosen)))
    homes = made(OnDisk(), in_files)
    total = sum(homes.needed.values())
    has_states = adam and any(unit.state_count for unit in units)
    if disk and has_states and (total > free or disk_part or weights_part):
        tried = [made(on_disk, in_files) for on_disk in _on_disk(units, free, disk_part)]
        totals = [sum(each.needed.values()) for each in tried]
        if weights_part or min(totals) > free:
            last = with_weights(_fewest_weights(units, free, weights_part, with_weights))
            tried = [last] if weights_part else [*tried, last]
            totals = [sum(each.needed.values()) for each in tried]
        # Whether a loop adds micro-batches up shows in its first steps: if possible, their sums have room then.
        sums = 0 if in_backward else sum(unit.wide_bytes for unit in units if unit.has_wide_form)
        fit = [at for at, size in enumerate(totals) if size <= free]
        roomy = [at for at in fit if totals[at] + sums <= free]
        at = (roomy or fit or [totals.index(min(totals))])[0]
        homes, total = tried[at], totals[at]
    if total > free:
        budget = ledger.budgets[Tier.HOST]
        parts = ", ".join(f"{tag.name} {format_bytes(size)}" for tag, size in homes.needed.items() if size)
        raise OutOfBudget(
            f"Cannot hold this model in {format_bytes(budget.limit_bytes)} of RAM",
            f"{format_bytes(total)} are needed, {total} bytes: {parts}",
            f"The limit is {budget.given}{f' ({budget.reason})' if budget.reason else ''}.",
            _remedy(units, homes, total, disk=disk, in_backward=in_backward)
            if optimizer
            else f"Raise it to at least {as_setting(total)}, or take a smaller model.",
        )
    return homes


def _homes(
    units: list[Unit],
    on_disk: OnDisk,
    *,
    optimizer: bool,
    adam: bool,
    in_files: InFiles = InFiles(),  # noqa: B008
) -> Homes:
    in_ram = [unit for unit in units if unit.index not in on_disk.layouts]
    sizes = [size for unit in in_ram for size in (unit.state_count * 4, unit.state_count * 4, unit.master_bytes)]
    flags = sum(1 + len(unit.trained) for unit in units) + on_disk.flags + in_files.flags
    homes = Homes(
        parameters=regions_for(0 if u.index in on_disk.weights else in_files.home_bytes(u) for u in units),
        gradients=regions_for(unit.grad_bytes for unit in units),
        ring_bytes=0,
        states=regions_for(sizes),
        factors_bytes=round_up(64 * 64, PAGE),
        flags=flags,
        adam=adam,
        on_disk=on_disk,
        in_files=in_files,
        needed={},
    )
    homes.needed[Tag.PARAMETERS] = sum(homes.parameters)
    homes.needed[Tag.GRADIENTS] = sum(homes.gradients) if optimizer else 0
    homes.needed[Tag.OPTIMIZER] = sum(homes.states) if adam else 0
    staging = board_bytes(flags) + (homes.factors_bytes if adam else 0)
    homes.needed[Tag.STAGING] = staging + on_disk.ram_bytes + round_up(in_files.ring_bytes, PAGE)
    return homes


def _with_ring(homes: Homes, units: list[Unit]) -> Homes:
    homes = replace(homes, ring_bytes=ring_bytes_for(units))
    homes.needed[Tag.GRADIENTS] = round_up(homes.ring_bytes, PAGE)
    return homes


def _on_disk(units: list[Unit], free_bytes: int, least_part: float) -> Iterator[OnDisk]:
    """More and more units, evenly spread, so that disk and CPU work side by side; at the end all of them. Chunks are
    cut smaller where RAM is short."""
    layouts = _layouts(units, free_bytes)
    for count in range(max(1, round(least_part * len(layouts))), len(layouts) + 1):
        yield _made({index: layouts[index] for index in _spread(layouts, count)})


def _fewest_weights(units: list[Unit], free_bytes: int, least_part: float, made: Callable[[OnDisk], Homes]) -> OnDisk:
    """The states of all units, and the weights of as few as fit then, evenly spread; of all, if none fit."""
    without, whole = _layouts(units, free_bytes), _layouts(units, free_bytes, weights=True)

    def of(count: int) -> OnDisk:
        some = _spread(whole, count)
        return _made({index: whole[index] if index in some else without[index] for index in whole})

    counts = range(max(1, round(least_part * len(whole))), len(whole))
    found = bisect.bisect_left(counts, x=True, key=lambda count: sum(made(of(count)).needed.values()) <= free_bytes)
    return of(counts.start + found)


def _layouts(units: list[Unit], free_bytes: int, *, weights: bool = False) -> dict[int, FileLayout]:
    """Of the units that have states."""
    elements = max(_LEAST_CHUNK, min(_MOST_CHUNK, free_bytes // _RAM_PART // FILE_THREADS // 12))
    return {unit.index: layout_of(unit, elements, weights=weights) for unit in units if unit.state_count}


def _spread(layouts: dict[int, FileLayout], count: int) -> set[int]:
    """So many of them."""
    size = len(layouts)
    return {index for at, index in enumerate(layouts) if at * count % size < count}


def _made(layouts: dict[int, FileLayout]) -> OnDisk:
    return OnDisk(layouts=layouts, thread_bytes=round_up(memory_bytes(layouts.values()), FILE_PAGE))


def _remedy(units: list[Unit], homes: Homes, total: int, *, disk: bool, in_backward: bool) -> str:
    """What would help, with the RAM that it needs."""
    lora = "or train an adapter (LoRA) instead of all weights"
    raising = f"Raise it to at least {as_setting(total)}"
    if homes.adam and not disk and any(unit.state_count for unit in units):
        *_, states = _on_disk(units, 64 * MiB, 1.0)
        size = sum(_least(units, states, in_backward=in_backward).needed.values())
        all_on_disk = _made(_layouts(units, 64 * MiB, weights=True))
        least = sum(_least(units, all_on_disk, in_backward=in_backward).needed.values())
        and_weights = f" (with all weights there too, {as_setting(least)})" if least < size else ""
        return (
            f"{raising}, or give disk= a directory: with {format_bytes(states.disk_bytes)} of the optimizer's "
            f"states there, {as_setting(size)} suffice{and_weights}, {lora}."
        )
    if disk and not in_backward:
        ring = sum(_with_ring(homes, units).needed.values())
        if ring < total:
            return f'{raising}, or take step="backward", which needs {as_setting(ring)}, {lora}.'
    return f"{raising}, {lora}."


def _least(units: list[Unit], on_disk: OnDisk, *, in_backward: bool) -> Homes:
    in_files = left_in_files([], scratch=list(on_disk.weights.values()))
    homes = _homes(units, on_disk, optimizer=True, adam=True, in_files=in_files)
    return _with_ring(homes, units) if in_backward else homes


def check_disk(on_disk: OnDisk, ledger: Ledger) -> None:
    """Raise if the disk's budget has no room for these states and weights."""
    needed, free = on_disk.disk_bytes, ledger.free_bytes(Tier.DISK)
    if needed > free:
        budget = ledger.budgets[Tier.DISK]
        raise OutOfBudget(
            f"Cannot hold {format_bytes(needed)} of optimizer states{' and weights' * bool(on_disk.weights)} on disk",
            f"{needed} bytes are needed, {format_bytes(free)} are allowed",
            f"The limit is {budget.given}{f' ({budget.reason})' if budget.reason else ''}.",
            f"Raise it to at least {as_setting(needed)}, free space there, or raise ram.",
        )
