"""The host arena: RAM that is mapped once, touched in parallel, page-locked, and handed out in exact pieces.

Why not ``torch.empty(..., pin_memory=True)``: its allocator rounds to powers of two (129 MiB become 256), locks page by page
(8 GiB took five seconds where mapping, touching and registering take less than one), and returns memory on a schedule of its own.
Why not ``cudaHostAlloc``: such memory cannot have huge pages, cannot be shared with another process, and cannot fall back to
pageable when the system refuses to lock it.

The mapping belongs to Python's ``mmap``, and every tensor made from it keeps it alive: a view that outlives its arena reads valid
memory, never a dangling address. What ends with the arena is the page-lock and the charge in the ledger.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core.errors import OutOfBudget, SettingError, StormError
from ..core.notices import say_once
from ..core.sizes import GiB, MiB, format_bytes, round_down, round_up
from ..core.tags import Tag, Tier
from ..native.touch import first_touch
from . import limits
from .extents import Extents
from .ledger import Ledger, Reservation
from .page_lock import PageLock

PAGE = mmap.PAGESIZE
_HUGE_PAGE = 2 * MiB
_GRAIN = 16  # enough for every dtype and vector load; a finer grain would leave holes that nothing fits into
_REGION_LIMIT = 64 * GiB  # one registration; drivers refuse very large ones, and a copy must not cross two


def natural_alignment(size: int) -> int:
    """Alignment for ``size`` bytes: a cache line for what is large, less where that would cost over 1/64 of the size."""
    return 64 if size >= 4096 else 32 if size >= 2048 else _GRAIN


def capacity_for(sizes: Iterable[int], alignment: int | None = None) -> int:
    """The capacity of an arena that holds exactly these allocations, made in this order."""
    end = 0
    for size in sizes:
        if size:
            end = round_up(round_up(end, alignment or natural_alignment(size)) + size, _GRAIN)
    return end


class HostBlock:
    """A piece of a host arena. Valid until released; the arena may then hand it out again."""

    __slots__ = ("_arena", "_region", "offset", "size")

    def __init__(self, arena: HostArena, region: _Region, offset: int, size: int) -> None:
        self._arena: HostArena | None = arena
        self._region = region
        self.offset, self.size = offset, size

    @property
    def place(self) -> tuple[int, int, int]:
        """(region, offset, size): the same bytes in an arena attached by another process."""
        return self._region.index, self.offset, self.size

    def tensor(self, dtype: torch.dtype = torch.uint8, shape: Iterable[int] | None = None) -> torch.Tensor:
        """A view of the block. Its memory may be reused once the block is released."""
        return self._region.view(self.offset, self.size, dtype, shape)

    def release(self) -> None:
        """Give the bytes back to the arena. No copy may still be reading or writing them. A second call does nothing."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena._give(self._region, self.offset, self.size)


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
        capacity_bytes: int,
        *,
        ledger: Ledger,
        tag: Tag,
        page_lock: PageLock | None = None,
        shared: bool = False,
        touch_threads: int | None = None,
    ) -> None:
        """Maps, touches and page-locks everything now. With ``page_lock`` given and refused, the arena stays pageable and says so."""
        self.capacity_bytes = round_up(capacity_bytes, PAGE)
        self.tag = tag
        self._lock = threading.Lock()
        self._reservation: Reservation | None = ledger.reserve(Tier.HOST, tag, self.capacity_bytes)
        self._regions: list[_Region] = []
        try:
            for index, start in enumerate(range(0, self.capacity_bytes, _REGION_LIMIT)):
                size = min(_REGION_LIMIT, self.capacity_bytes - start)
                self._regions.append(_map_shared(index, size) if shared else _map_private(index, size))
                first_touch(self._regions[-1].address, size, touch_threads)
        except BaseException:
            _close(None, [], [r.descriptor for r in self._regions if r.descriptor is not None], self._reservation)
            raise
        self._finish(page_lock)

    @classmethod
    def attach(cls, shared: SharedArena, *, page_lock: PageLock | None = None) -> HostArena:
        """Map an arena that another process made with ``shared=True``. Its owner carries the charge; nothing can be allocated here."""
        arena = cls.__new__(cls)
        arena.capacity_bytes = sum(shared.region_bytes)
        arena.tag = Tag.PARAMETERS
        arena._lock = threading.Lock()
        arena._reservation = None
        arena._regions = []
        for index, (descriptor, size) in enumerate(zip(shared.descriptors, shared.region_bytes, strict=True)):
            path = Path(f"/proc/{shared.pid}/fd/{descriptor}")
            try:
                opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise SettingError(
                    f"Cannot attach the shared arena of process {shared.pid}: {error.strerror}. It must still run."
                ) from error
            arena._regions.append(_Region(index, mmap.mmap(opened, size), 0, size, opened, Extents(0)))
        arena._finish(page_lock)
        return arena

    def _finish(self, page_lock: PageLock | None) -> None:
        locked = _lock_regions(self._regions, page_lock)
        self.pinned = bool(locked) or (page_lock is not None and not self._regions)
        if self.pinned and self._reservation is not None:
            self._reservation.mark_pinned()
        descriptors = [region.descriptor for region in self._regions if region.descriptor is not None]
        self._finalizer = weakref.finalize(self, _close, page_lock, locked, descriptors, self._reservation)

    @property
    def taken_bytes(self) -> int:
        """Bytes in live blocks."""
        with self._lock:
            return sum(region.extents.taken_bytes for region in self._regions)

    def allocate(self, size: int, *, alignment: int | None = None) -> HostBlock:
        """A block of exactly ``size`` bytes. Raises OutOfBudget if no hole of the arena is large enough."""
        if not self._finalizer.alive:
            raise StormError("Cannot allocate from a host arena that was closed.")
        if size == 0:
            return HostBlock(self, _EMPTY, 0, 0)
        with self._lock:
            for region in self._regions:
                offset = region.extents.take(size, alignment or natural_alignment(size))
                if offset is not None:
                    return HostBlock(self, region, offset, size)
        raise OutOfBudget(
            f"Cannot allocate {format_bytes(size)} for {self.tag.name} from a host arena",
            f"{format_bytes(self.taken_bytes)} of {format_bytes(self.capacity_bytes)} taken, no hole is large enough",
            "The limit is the size that the arena was planned with.",
            "Plan it with capacity_for the sizes that it must hold.",
        )

    def tensor(self, shape: Iterable[int], dtype: torch.dtype, *, alignment: int | None = None) -> torch.Tensor:
        """A tensor for the life of the arena, where nobody will release the block."""
        shape = torch.Size(shape)
        return self.allocate(shape.numel() * dtype.itemsize, alignment=alignment).tensor(dtype, shape)

    def at(self, place: tuple[int, int, int], dtype: torch.dtype, shape: Iterable[int] | None = None) -> torch.Tensor:
        """The tensor at a ``HostBlock.place`` of this arena, or of the arena that this one is attached to."""
        region, offset, size = place
        return (self._regions[region] if size else _EMPTY).view(offset, size, dtype, shape)

    def share(self) -> SharedArena:
        """The name by which another process of this user can attach the arena. Only for arenas made with ``shared=True``."""
        descriptors = tuple(region.descriptor for region in self._regions if region.descriptor is not None)
        assert len(descriptors) == len(self._regions), "only an arena made with shared=True can be shared"
        return SharedArena(os.getpid(), descriptors, tuple(region.size for region in self._regions))

    def check(self) -> None:
        """Assert that free and taken pieces tile the arena."""
        with self._lock:
            for region in self._regions:
                region.extents.check()

    def close(self) -> None:
        """Unlock the pages and return the charge. All copies from and to the arena must have ended. Safe to call twice.

        The memory itself goes when the last tensor made from it does.
        """
        self._finalizer()
        self.pinned = False
        self._regions = []

    def _give(self, region: _Region, offset: int, size: int) -> None:
        with self._lock:
            region.extents.give(offset, size)


class _Region:
    """One mapping. ``bytes`` spans the usable part and keeps the mapping alive, as does every view made from it."""

    __slots__ = ("bytes", "descriptor", "extents", "index", "size")

    def __init__(
        self, index: int, mapping: mmap.mmap | None, start: int, size: int, descriptor: int | None, extents: Extents
    ) -> None:
        self.index, self.size, self.descriptor, self.extents = index, size, descriptor, extents
        if mapping is None:
            self.bytes = torch.empty(0, dtype=torch.uint8)
        else:
            self.bytes = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start)

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()

    def view(self, offset: int, size: int, dtype: torch.dtype, shape: Iterable[int] | None) -> torch.Tensor:
        flat = self.bytes[offset : offset + size].view(dtype)
        return flat if shape is None else flat.view(torch.Size(shape))


_EMPTY = _Region(0, None, 0, 0, None, Extents(0))


def _map_private(index: int, size: int) -> _Region:
    """Anonymous memory aligned to huge pages. The slack for the alignment is never touched, so it costs addresses only."""
    mapping = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr() % _HUGE_PAGE
    whole = round_down(size, _HUGE_PAGE)  # the tail stays in small pages: a huge one would exceed what was charged
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE, start, whole)
        except OSError:
            pass  # a kernel without transparent huge pages: small ones work as well, only more slowly to lock
    return _Region(index, mapping, start, size, None, Extents(size, grain=_GRAIN))


def _map_shared(index: int, size: int) -> _Region:
    """Memory in an anonymous file: no name, no use of /dev/shm, gone with its last user."""
    descriptor = os.memfd_create("stormtorch", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return _Region(index, mmap.mmap(descriptor, size), 0, size, descriptor, Extents(size, grain=_GRAIN))


def _lock_regions(regions: list[_Region], page_lock: PageLock | None) -> list[int]:
    """Page-lock all regions or none; returns the locked addresses."""
    locked: list[int] = []
    if page_lock is None:
        return locked
    total = sum(region.size for region in regions)
    for region in regions:
        try:
            page_lock.lock(region.address, region.size)
        except StormError as error:
            for address in locked:
                page_lock.unlock(address)
            say_once(
                f"Host page-lock refused for {format_bytes(total)} ({error}); the limit is {limits.page_lock_limit()}. "
                "Copies go through a small page-locked ring instead, at a lower rate.",
                key="page-lock refused",
            )
            return []
        locked.append(region.address)
    return locked


def _close(
    page_lock: PageLock | None, locked: list[int], descriptors: list[int], reservation: Reservation | None
) -> None:
    if page_lock is not None:
        for address in locked:
            page_lock.unlock(address)
    for descriptor in descriptors:
        os.close(descriptor)
    if reservation is not None:
        reservation.release()
