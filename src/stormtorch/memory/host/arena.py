"""The host arena: RAM that is mapped once, touched in parallel, page-locked, and handed out in exact pieces.

Why not ``torch.empty(..., pin_memory=True)``: its allocator rounds to powers of two (129 MiB become 256), locks page by
page (8 GiB take seconds where mapping, touching and registering take a fraction of one), and returns memory on a
schedule of its own. Why not ``cudaHostAlloc``: such memory cannot have huge pages, cannot be shared with another
process, and cannot fall back to pageable when the system refuses to lock it.

Every tensor made from an arena keeps its mapping alive, with the page-lock and the ledger's charge: an arena that is
merely dropped ends with its last tensor. ``close`` ends lock and charge at once; a tensor that outlives it still reads
valid memory, never a dangling address, but that memory is pageable and no longer counted. A forked child has no access
to a page-locked arena.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...core.budget import Budget
from ...core.errors import OutOfBudget, SettingError, StormError
from ...core.sizes import GiB, MiB, format_bytes, parse_bytes, round_up
from ...core.tags import Tag, Tier
from ...native.touch import first_touch
from ..books.ledger import Ledger
from .pinned import Hold, settle_others
from .pinning import PageLock
from .region import Region, attach_region, map_private, map_shared

PAGE = mmap.PAGESIZE
_REGION_LIMIT = 64 * GiB  # of one registration; drivers refuse very large ones, and a copy must not cross two
_REGION_AIM = 512 * MiB  # if sizes are known: one is locked while the next is touched, and the driver is soon free


def _alignment_for(size: int) -> int:
    """Alignment for ``size`` bytes: enough for every vector load, and a cache line where that costs little."""
    return 64 if size >= 4096 else 32 if size >= 2048 else 16


def regions_for(sizes: Iterable[int]) -> list[int]:
    """The regions of an arena that holds exactly these allocations, made in this order; none crosses two."""
    ends = [0]
    for size in sizes:
        start = round_up(ends[-1], _alignment_for(size))
        if ends[-1] and start + size > _REGION_AIM:
            ends.append(0)
            start = 0
        ends[-1] = start + size if size else ends[-1]
    return [round_up(end, PAGE) for end in ends]


class Place(NamedTuple):
    """Bytes of an arena; the same ones in an arena that another process has attached."""

    region: int
    offset: int
    size: int


@dataclass(frozen=True)
class SharedArena:
    """A name for a shared arena that another process can attach; small and picklable. Valid while the owner lives."""

    pid: int
    descriptors: tuple[int, ...]
    region_bytes: tuple[int, ...]


class HostArena:
    """Exactly ``capacity_bytes`` of RAM, charged to the ledger before it is mapped. Thread-safe."""

    def __init__(
        self,
        capacity: int | Sequence[int],
        *,
        ledger: Ledger,
        tag: Tag,
        page_lock: PageLock | None = None,
        shared: bool = False,
        lock_behind: bool = False,
        fill_later: bool = False,
        returning_bytes: int = 0,
    ) -> None:
        """Maps, touches and page-locks everything now. ``capacity``: bytes, or those of each region (``regions_for``).

        If ``page_lock`` is refused, the arena remains pageable and tells the user. ``lock_behind`` leaves touching and
        locking, nearly all of the time that this takes, to a thread: the CPU may use the memory at once, and lanes once
        it is ``settled``. ``fill_later`` maps only: ``fill`` does the rest. ``returning_bytes`` are in use now, and
        will be freed as the arena is filled."""
        sizes = _whole_regions(parse_bytes(capacity)) if not isinstance(capacity, Sequence) else capacity
        reservation = ledger.reserve(Tier.HOST, tag, sum(sizes), returning_bytes=returning_bytes)
        self._begin(Hold(reservation, page_lock, behind=lock_behind))

        def made() -> Iterator[Region]:
            for index, size in enumerate(size for size in sizes if size):
                region = map_shared(index, size) if shared else map_private(index, size, fork=page_lock is None)
                self._add(region)
                if not self._hold.touches and not fill_later:
                    first_touch(region.address, size)
                yield region

        with self._ending_on_error():
            if fill_later:
                deque(made(), maxlen=0)
            else:
                self._finish(made())

    @classmethod
    def attach(cls, shared: SharedArena, *, page_lock: PageLock | None = None) -> HostArena:
        """Map an arena that another process made with ``shared=True``. The owner carries the charge; nothing can be
        allocated here."""
        arena = cls.__new__(cls)
        nothing = Budget(tier=Tier.HOST, limit_bytes=0, given="no memory of its own")
        arena._begin(Hold(Ledger(nothing).reserve(Tier.HOST, Tag.STAGING, 0), page_lock))
        with arena._ending_on_error():
            for index, (descriptor, size) in enumerate(zip(shared.descriptors, shared.region_bytes, strict=True)):
                arena._add(attach_region(index, shared.pid, descriptor, size))
            arena._finish(arena._regions)
        return arena

    def _begin(self, hold: Hold) -> None:
        self._hold, self._regions, self._closed = hold, list[Region](), False
        self.capacity_bytes = self.taken_bytes = 0
        self._lock = threading.Lock()

    def _add(self, region: Region) -> None:
        self._hold.add(region)
        self._regions.append(region)
        self.capacity_bytes += region.size

    def fill(self, write: Callable[[int], None]) -> None:
        """Let ``write`` touch and write each region, by index; each is page-locked while the next is written."""

        def written() -> Iterator[Region]:
            for region in self._regions:
                write(region.index)
                yield region

        with self._ending_on_error():
            self._finish(written())

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with contextlib.suppress(StormError):  # an interrupted lock may or may not have happened
                self._hold.end_all()
            raise

    def _finish(self, regions: Iterable[Region]) -> None:
        self._hold.lock(regions)
        if not self._hold.behind:
            self.settle()
            if self._hold.refusal is not None and settle_others(self._hold):
                self._hold.lock(self._regions)  # other arenas may have returned locked memory since
                self.settle()
            self._hold.say_if_refused()

    @property
    def settled(self) -> bool:
        """Whether page-locking has ended, with or without success."""
        return self._hold.outcome.done()

    @property
    def pinned(self) -> bool:
        """Whether all of it is page-locked by now."""
        outcome = self._hold.outcome
        return not self._closed and outcome.done() and outcome.exception() is None and outcome.result()

    def settle(self) -> None:
        """Block until it is ``settled``."""
        self._hold.outcome.result()

    def say_if_refused(self) -> None:
        """Tell the user, once, if it could not be page-locked."""
        self._hold.say_if_refused()

    def allocate(self, size: int, *, alignment: int | None = None) -> Place:
        """Take exactly ``size`` bytes for the life of the arena. Raises OutOfBudget if no region has them left."""
        if self._closed:
            raise StormError("Cannot allocate from a host arena that was closed.")
        size = parse_bytes(size)
        if size == 0:
            return Place(0, 0, 0)
        with self._lock:
            for region in self._regions:
                start = round_up(region.used_bytes, alignment or _alignment_for(size))
                if start + size <= region.size:
                    region.used_bytes = start + size
                    self.taken_bytes += size
                    return Place(region.index, start, size)
        if size > _REGION_LIMIT:
            raise SettingError(
                f"Cannot allocate {format_bytes(size)} in one piece: page-locked memory comes in regions of "
                f"{format_bytes(_REGION_LIMIT)}. Use several smaller pieces."
            )
        raise OutOfBudget(
            f"Cannot allocate {format_bytes(size)} for {self._hold.reservation.tag.name} from a host arena",
            f"{format_bytes(self.taken_bytes)} of {format_bytes(self.capacity_bytes)} taken, no region has room",
            "The limit is the size with which the arena was planned.",
            "Plan it with regions_for() of the sizes that it must hold.",
        )

    def tensor(self, shape: Iterable[int], dtype: torch.dtype, *, alignment: int | None = None) -> torch.Tensor:
        """A tensor in bytes of its own."""
        shape = tuple(parse_bytes(length) for length in shape)
        return self.at(self.allocate(math.prod(shape) * dtype.itemsize, alignment=alignment), dtype, shape)

    def at(self, place: Place, dtype: torch.dtype = torch.uint8, shape: Iterable[int] | None = None) -> torch.Tensor:
        """The tensor at a place of this arena, or of the arena that this one is attached to."""
        memory = self._regions[place.region].bytes if place.size else _NOTHING
        flat = memory[place.offset : place.offset + place.size].view(dtype)
        return flat if shape is None else flat.view(torch.Size(shape))

    def share(self) -> SharedArena:
        """The name by which another process of this user can attach the arena. Only for arenas made with
        ``shared=True``."""
        descriptors = tuple(region.descriptor for region in self._regions if region.descriptor is not None)
        if len(descriptors) != len(self._regions):
            raise SettingError("Only a host arena made with shared=True can be shared.")
        return SharedArena(os.getpid(), descriptors, tuple(region.size for region in self._regions))

    def close(self) -> None:
        """Unlock the pages and return the charge. All copies from and to the arena must have ended. Safe to call twice.
        The memory itself goes when the last tensor made from it does."""
        self._closed = True
        try:
            self._hold.end_all()
        finally:
            self._regions = []


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def untouched(size: int) -> torch.Tensor:
    """A tensor of ``size`` bytes for views of which only the shapes are used. Callers must not read or write it: then
    the system never gives it a page, so it takes no RAM and is not charged."""
    # A storage, because torch may be told to fill new tensors.
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(torch.UntypedStorage(size, device="cpu"))


def _whole_regions(capacity_bytes: int) -> list[int]:
    whole, rest = divmod(round_up(capacity_bytes, PAGE), _REGION_LIMIT)
    return [_REGION_LIMIT] * whole + [rest]
