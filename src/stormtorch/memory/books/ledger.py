"""The ledger of every byte: reservations are charged to a tier and a tag *before* anything is allocated.

A refusal therefore leaves nothing to undo, and comes with the numbers instead of a kill -9. Two limits are enforced:
the user's budget, and the memory that the machine has free at that moment, because a budget of 64 GiB means little once
a browser took 40 of them.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...core.budget import Budget
from ...core.errors import OutOfBudget, SettingError
from ...core.sizes import GiB, MiB, format_bytes, parse_bytes
from ...core.tags import Tag, Tier
from . import limits

Available = Callable[[], int]


class Reservation:
    """Bytes charged to one tier and tag until ``release``, or until nothing refers to it any more. The second keeps the
    sums right where an exception or Ctrl-C ends the code that would have released it."""

    __slots__ = ("__weakref__", "_book", "_number", "bytes", "pinned", "tag", "tier")

    def __init__(self, book: _Book, number: int, tier: Tier, tag: Tag, size: int) -> None:
        self._book, self._number = book, number
        self.tier, self.tag, self.bytes = tier, tag, size
        self.pinned = False  # whether these host bytes are page-locked

    def release(self) -> None:
        """Give the bytes back to the ledger. A second call does nothing. Safe inside a finalizer: it takes no lock."""
        self._book.pop(self._number, None)


_Book = weakref.WeakValueDictionary[int, Reservation]


@dataclass(frozen=True, slots=True)
class Balance:
    """One line of the ledger: the bytes of a tag on a tier, now and at the peak."""

    tier: Tier
    tag: Tag
    used_bytes: int
    peak_bytes: int


class Ledger:
    """Budgets of all tiers and the reservations charged to them. Thread-safe; never allocates."""

    def __init__(self, *budgets: Budget, available: Mapping[Tier, Available] | None = None) -> None:
        """``available``: functions that give a tier's free bytes on the machine; other tiers have the budget alone."""
        self.budgets: dict[Tier, Budget] = {budget.tier: budget for budget in budgets}
        self._available = dict(available or {})
        # Only the live reservations are stored, and all sums are made from them: an interrupting signal or finalizer
        # can then leave no wrong total behind. There are dozens of them, not thousands.
        self._book: _Book = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._lock = threading.RLock()  # re-entrant: the garbage collector may end an arena inside any call below
        self._peak: dict[tuple[Tier, Tag], int] = {}
        self._tier_peak = dict.fromkeys(Tier, 0)

    def reserve(self, tier: Tier, tag: Tag, size: int, *, returning_bytes: int = 0) -> Reservation:
        """Charge ``size`` bytes or raise OutOfBudget; allocates nothing itself. ``returning_bytes`` are in use now, and
        become free as the new ones are taken."""
        size, budget = parse_bytes(size), self.budgets.get(tier)
        what = f"Cannot reserve {format_bytes(size)} on {_THE[tier]} for {tag.name}"
        if budget is None:
            raise OutOfBudget(
                what,
                "no budget for it",
                f"{tier.setting} was not given.",
                "Give disk= a directory." if tier is Tier.DISK else f"Give {tier.setting}= a size.",
            )
        free = self._available[tier]() if tier in self._available and size else None
        with self._lock:
            used = self.used_bytes(tier)
            numbers = f"{format_bytes(used)} of {format_bytes(budget.limit_bytes)} used"
            if used + size > budget.limit_bytes:
                limit = f"The limit is {budget.given}{f' ({budget.reason})' if budget.reason else ''}."
                raise OutOfBudget(what, numbers, limit, _REMEDY[tier])
            if free is not None and size > free + returning_bytes:
                limit = f"The limit is what other programs leave, not {budget.given}."
                numbers += f", but only {format_bytes(free)} are free now"
                raise OutOfBudget(what, numbers, limit, _REMEDY_FREE[tier])
            number = next(self._numbers)
            reservation = self._book[number] = Reservation(self._book, number, tier, tag, size)
            self._tier_peak[tier] = max(self._tier_peak[tier], used + size)
            self._peak[tier, tag] = max(self._peak.get((tier, tag), 0), self.used_bytes(tier, tag))
        return reservation

    def used_bytes(self, tier: Tier, tag: Tag | None = None) -> int:
        """Bytes charged to ``tier`` now, or those of ``tag`` alone."""
        return sum(live.bytes for live in self._live() if live.tier is tier and tag in (None, live.tag))

    def peak_bytes(self, tier: Tier) -> int:
        return self._tier_peak[tier]

    def free_bytes(self, tier: Tier) -> int:
        """Bytes that the budget of ``tier`` still allows; 0 without a budget."""
        budget = self.budgets.get(tier)
        return 0 if budget is None else budget.limit_bytes - self.used_bytes(tier)

    @property
    def pinned_bytes(self) -> int:
        """Host bytes charged as page-locked."""
        return sum(live.bytes for live in self._live() if live.pinned)

    def balances(self) -> list[Balance]:
        """Every tag that was ever charged, in the order of tiers and tags."""
        return [
            Balance(tier, tag, self.used_bytes(tier, tag), self._peak[tier, tag])
            for tier in Tier
            for tag in Tag
            if (tier, tag) in self._peak
        ]

    def check(self) -> None:
        """Assert conservation: the tags of a tier add up to it, and it has never exceeded its budget."""
        for tier, budget in self.budgets.items():
            used = self.used_bytes(tier)
            assert used == sum(line.used_bytes for line in self.balances() if line.tier is tier)
            assert used <= self._tier_peak[tier] <= budget.limit_bytes
        assert all(line.used_bytes <= line.peak_bytes for line in self.balances())
        assert self.pinned_bytes <= self.used_bytes(Tier.HOST)

    def _live(self) -> list[Reservation]:
        # Not values(), which fails where another thread releases a reservation meanwhile.
        return [live for reference in self._book.valuerefs() if (live := reference()) is not None]


_THE = {Tier.DEVICE: "the device", Tier.HOST: "the host", Tier.DISK: "the disk"}
_REMEDY = {
    Tier.DEVICE: "Raise it, or take a smaller batch or a shorter sequence.",
    Tier.HOST: "Raise it, or take a smaller batch, or train an adapter (LoRA) instead of all weights.",
    Tier.DISK: "Free space there, or name a directory on another disk.",
}
_REMEDY_FREE = {
    Tier.DEVICE: "End other programs on the GPU, or lower vram.",
    Tier.HOST: "End other programs, or lower ram.",
    Tier.DISK: "Free space there, or name a directory on another disk.",
}


def open_ledger(
    device: torch.device | str,
    *,
    vram: object = "auto",
    ram: object = "auto",
    disk: Path | str | Sequence[Path] | None = None,
    disk_limit: object = None,
    returning_bytes: int = 0,
) -> Ledger:
    """A ledger for this machine from the user's settings; refuses budgets that the machine can never meet.
    ``disk``: directories. ``returning_bytes`` of RAM are in use now and become free as the budget is used."""
    device = limits.usable_device(device)
    free, total = limits.device_memory_bytes(device)
    host_free, host_total = limits.host_available_bytes() + returning_bytes, limits.host_total_bytes()
    others = "the driver, cuBLAS and fragmentation" if device.type == "cuda" else "fragmentation"
    system = "the system, the page cache and your own program"
    room, host_room = max(512 * MiB, total // 50), max(2 * GiB, host_total // 20)
    budgets = [
        _budget(Tier.DEVICE, vram, free=free, total=total, headroom=room, kept_for=others),
        _budget(Tier.HOST, ram, free=host_free, total=host_total, headroom=host_room, kept_for=system),
    ]
    available: dict[Tier, Available] = {Tier.HOST: limits.host_available_bytes}
    if device.type == "cuda":
        available[Tier.DEVICE] = lambda: limits.device_memory_bytes(device)[0]
    if disk:
        directories = [Path(disk)] if isinstance(disk, str | Path) else list(disk)
        budgets.append(_disk_budget(directories, disk_limit))
        available[Tier.DISK] = lambda: _disk_bytes(directories)[0]
    return Ledger(*budgets, available=available)


def _budget(tier: Tier, value: object, *, free: int, total: int, headroom: int, kept_for: str) -> Budget:
    name = tier.setting
    if str(value).strip().lower() != "auto":
        limit = parse_bytes(value, setting=name)
        if limit > total:
            raise SettingError(
                f"{name}={value!r} is {format_bytes(limit)}, but {_THE[tier]} has {format_bytes(total)} in all. "
                f"Give at most that, or {name}='auto'."
            )
        return Budget(tier=tier, limit_bytes=limit, given=f"{name}={value!r}")
    return _automatic(tier, f"{name}='auto'", free=free, total=total, headroom=headroom, kept_for=kept_for)


def _disk_budget(directories: Sequence[Path], limit: object) -> Budget:
    given = f"disk={', '.join(map(str, directories))!r}"
    for directory in directories:
        if not directory.is_dir():
            raise SettingError(
                f"disk={str(directory)!r} is not a directory. Name one that exists, on a fast local disk."
            )
    free, total = _disk_bytes(directories)
    if limit is None:
        return _automatic(
            Tier.DISK, given, free=free, total=total, headroom=max(GiB, free // 20), kept_for="others there"
        )
    size = parse_bytes(limit, setting="disk_limit")
    if size > total:
        raise SettingError(
            f"disk_limit={limit!r} is {format_bytes(size)}, but {given} has {format_bytes(total)} in all. Give at most "
            "that."
        )
    return Budget(tier=Tier.DISK, limit_bytes=size, given=f"disk_limit={limit!r}")


def _disk_bytes(directories: Sequence[Path]) -> tuple[int, int]:
    """(free, total) bytes of the filesystems of these directories, each counted once."""
    filesystems = {directory.stat().st_dev: directory for directory in directories}
    sizes = [limits.disk_bytes(directory) for directory in filesystems.values()]
    return sum(free for free, _ in sizes), sum(total for _, total in sizes)


def _automatic(tier: Tier, given: str, *, free: int, total: int, headroom: int, kept_for: str) -> Budget:
    """A budget of the free memory less a head-room, with the numbers as the reason."""
    # On a small machine a fixed head-room could leave nothing: keep back at most half.
    kept = min(headroom, free // 2)
    reason = f"{format_bytes(free)} free of {format_bytes(total)}, less {format_bytes(kept)} for {kept_for}"
    return Budget(tier=tier, limit_bytes=free - kept, given=given, reason=reason)
