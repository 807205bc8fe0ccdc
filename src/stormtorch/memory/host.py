"""The host arena: RAM that is mapped once, touched in parallel, page-locked, and handed out in exact pieces.

Why not ``torch.empty(..., pin_memory=True)``: its allocator rounds to powers of two (129 MiB become 256), locks page by
page (8 GiB took five seconds where mapping, touching and registering take less than one), and returns memory on a
schedule of its own. Why not ``cudaHostAlloc``: such memory cannot have huge pages, cannot be shared with another
process, and cannot fall back to pageable when the system refuses to lock it.

Every tensor made from an arena keeps its mapping alive, with the page-lock and the charge in the ledger: an arena that
is merely dropped goes when its last tensor does. ``close`` ends lock and charge at once; a tensor that outlives it
still reads valid memory, never a dangling address, but memory that is pageable and that nobody counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

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
    """Alignment for ``size`` bytes: a cache line for what is large, less where that costs over 1/64 of the size."""
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

    def __init__(self, arena: HostArena, region: _Region | None, offset: int, size: int) -> None:
        """``region`` is None for an empty block, which lies nowhere."""
        self._arena: HostArena | None = arena
        self._region = region
        self.offset, self.size = offset, size

    @property
    def place(self) -> tuple[int, int, int]:
        """(region, offset, size): the same bytes in an arena attached by another process."""
        return self._region.index if self._region is not None else 0, self.offset, self.size

    def tensor(self, dtype: torch.dtype = torch.uint8, shape: Iterable[int] | None = None) -> torch.Tensor:
        """A view of the block. Its memory may be reused once the block is released."""
        return _view(self._region.bytes if self._region is not None else _NOTHING, self.offset, self.size, dtype, shape)

    def release(self) -> None:
        """Give the bytes back to the arena.

        No copy may still be reading or writing them. A second call does nothing.
        """
        arena, self._arena = self._arena, None
        if arena is not None and self._region is not None:
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
        """Maps, touches and page-locks everything now.

        With ``page_lock`` given and refused, the arena stays pageable and says so.
        """
        self.capacity_bytes = round_up(capacity_bytes, PAGE)
        self.tag = tag
        self._lock = threading.Lock()
        self._regions: list[_Region] = []
        whole, rest = divmod(self.capacity_bytes, _REGION_LIMIT)
        reservation = ledger.reserve(Tier.HOST, tag, self.capacity_bytes)
        try:
            for index, size in enumerate([_REGION_LIMIT] * whole + [rest] * (rest > 0)):
                self._regions.append(_map_shared(index, size) if shared else _map_private(index, size))
                first_touch(self._regions[-1].address, size, touch_threads)
        except BaseException:
            reservation.release()
            raise
        self._finish(page_lock, reservation)

    @classmethod
    def attach(cls, shared: SharedArena, *, page_lock: PageLock | None = None) -> HostArena:
        """Map an arena that another process made with ``shared=True``.

        Its owner carries the charge; nothing can be allocated here.
        """
        arena = cls.__new__(cls)
        arena.capacity_bytes = sum(shared.region_bytes)
        arena.tag = Tag.STAGING
        arena._lock = threading.Lock()
        arena._regions = [
            _attach(index, shared.pid, descriptor, size)
            for index, (descriptor, size) in enumerate(zip(shared.descriptors, shared.region_bytes, strict=True))
        ]
        arena._finish(page_lock, None)
        return arena

    def _finish(self, page_lock: PageLock | None, reservation: Reservation | None) -> None:
        """Page-lock the regions, all or none, and see to it that whatever ends them gives everything back."""
        self._closed = False
        self.pinned = page_lock is not None and _lock_regions(self._regions, page_lock)
        if self.pinned and reservation is not None:
            reservation.mark_pinned()
        used_lock = page_lock if self.pinned else None
        live = {region.index for region in self._regions}
        if not live and reservation is not None:
            reservation.release()  # an arena of nothing
        self._finalizers = [
            weakref.finalize(
                region.pages, _end, used_lock, region.address, region.descriptor, reservation, live, region.index
            )
            for region in self._regions
        ]
        for region in self._regions:
            del region.pages  # from here on the tensors alone keep them

    @property
    def taken_bytes(self) -> int:
        """Bytes in live blocks."""
        with self._lock:
            return sum(region.extents.taken_bytes for region in self._regions)

    def allocate(self, size: int, *, alignment: int | None = None) -> HostBlock:
        """A block of exactly ``size`` bytes. Raises OutOfBudget if no hole of the arena is large enough."""
        if self._closed:
            raise StormError("Cannot allocate from a host arena that was closed.")
        if size == 0:
            return HostBlock(self, None, 0, 0)
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
        return _view(self._regions[region].bytes if size else _NOTHING, offset, size, dtype, shape)

    def share(self) -> SharedArena:
        """The name by which another process of this user can attach the arena.

        Only for arenas made with ``shared=True``.
        """
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
        self._closed, self.pinned = True, False
        for finalizer in self._finalizers:
            finalizer()
        self._regions = []

    def _give(self, region: _Region, offset: int, size: int) -> None:
        with self._lock:
            region.extents.give(offset, size)


class _Region:
    """One mapping. ``bytes``, and every view made from it, keeps it alive."""

    __slots__ = ("bytes", "descriptor", "extents", "index", "pages", "size")

    def __init__(self, index: int, mapping: mmap.mmap, start: int, size: int, descriptor: int | None = None) -> None:
        self.index, self.size, self.descriptor = index, size, descriptor
        self.extents = Extents(size, grain=_GRAIN)
        # Through a ctypes array, not from the mmap itself: its finalizer runs before the mapping ends, an mmap's after.
        self.pages = (ctypes.c_ubyte * size).from_buffer(mapping, start)
        self.bytes = torch.frombuffer(self.pages, dtype=torch.uint8)

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _view(data: torch.Tensor, offset: int, size: int, dtype: torch.dtype, shape: Iterable[int] | None) -> torch.Tensor:
    flat = data[offset : offset + size].view(dtype)
    return flat if shape is None else flat.view(torch.Size(shape))


def _map_private(index: int, size: int) -> _Region:
    """Anonymous memory aligned to huge pages.

    The slack for the alignment is never touched, so it costs addresses only.
    """
    mapping = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_ubyte.from_buffer(mapping)) % _HUGE_PAGE
    whole = round_down(size, _HUGE_PAGE)  # the tail stays in small pages: a huge one would exceed what was charged
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without transparent huge pages refuses: small ones work as well, only more slowly to lock.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return _Region(index, mapping, start, size)


def _map_shared(index: int, size: int) -> _Region:
    """Memory in an anonymous file: no name, no use of /dev/shm, gone with its last user."""
    descriptor = os.memfd_create("stormtorch", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return _Region(index, mmap.mmap(descriptor, size), 0, size, descriptor)


def _attach(index: int, pid: int, descriptor: int, size: int) -> _Region:
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SettingError(
            f"Cannot attach the shared arena of process {pid}: {error.strerror}. It must run, with the arena open."
        ) from error
    region = _Region(index, mmap.mmap(opened, size), 0, size, opened)
    region.extents = Extents(0)  # what is free is the owner's to know
    return region


def _lock_regions(regions: list[_Region], page_lock: PageLock) -> bool:
    """Page-lock all regions or none; says so once if it is none."""
    locked: list[int] = []
    for region in regions:
        try:
            page_lock.lock(region.address, region.size)
        except StormError as error:
            for address in locked:
                page_lock.unlock(address)
            say_once(
                f"Host page-lock refused for {format_bytes(sum(r.size for r in regions))} ({error}); the limit is "
                f"{limits.page_lock_limit()}. Copies go through a small page-locked ring instead, at a lower rate.",
                key="page-lock refused",
            )
            return False
        locked.append(region.address)
    return True


def _end(
    page_lock: PageLock | None,
    address: int,
    descriptor: int | None,
    reservation: Reservation | None,
    live: set[int],
    index: int,
) -> None:
    """Runs once for each region, when it is closed or its last tensor goes. The last one returns the charge."""
    if page_lock is not None:
        page_lock.unlock(address)
    if descriptor is not None:
        os.close(descriptor)
    live.discard(index)
    if not live and reservation is not None:
        reservation.release()
