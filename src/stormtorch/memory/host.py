"""The host arena: RAM that is mapped once, touched in parallel, page-locked, and handed out in exact pieces.

Why not ``torch.empty(..., pin_memory=True)``: its allocator rounds to powers of two (129 MiB become 256), locks page by
page (8 GiB take seconds where mapping, touching and registering take a fraction of one), and returns memory on a
schedule of its own. Why not ``cudaHostAlloc``: such memory cannot have huge pages, cannot be shared with another
process, and cannot fall back to pageable when the system refuses to lock it.

Every tensor made from an arena keeps its mapping alive, with the page-lock and the charge in the ledger: an arena that
is merely dropped goes when its last tensor does. ``close`` ends lock and charge at once; a tensor that outlives it
still reads valid memory, never a dangling address, but memory that is pageable and that nobody counts. A forked child
has no access to a page-locked arena.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from ..core.errors import OutOfBudget, SettingError, StormError
from ..core.notices import say_once
from ..core.sizes import GiB, MiB, format_bytes, parse_bytes, round_down, round_up
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
_REGION_AIM = 2 * GiB  # where sizes are known beforehand: one region is locked while the next is being touched


def natural_alignment(size: int) -> int:
    """Alignment for ``size`` bytes: a cache line for what is large, less where that costs over 1/64 of the size."""
    return 64 if size >= 4096 else 32 if size >= 2048 else _GRAIN


def regions_for(sizes: Iterable[int], alignment: int | None = None) -> list[int]:
    """The regions of an arena that holds exactly these allocations, made in this order; none crosses two."""
    ends = [0]
    for size in sizes:
        start = round_up(ends[-1], alignment or natural_alignment(size))
        if ends[-1] and start + size > _REGION_AIM:
            ends.append(0)
            start = 0
        ends[-1] = start + round_up(size, _GRAIN) if size else ends[-1]
    return [round_up(end, PAGE) for end in ends]


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
        capacity: int | Sequence[int],
        *,
        ledger: Ledger,
        tag: Tag,
        page_lock: PageLock | None = None,
        shared: bool = False,
        lock_behind: bool = False,
    ) -> None:
        """Maps, touches and page-locks everything now. ``capacity``: bytes, or those of each region (``regions_for``).

        With ``page_lock`` given and refused, the arena stays pageable and says so. ``lock_behind`` leaves the locking,
        most of the time that all this takes, to a thread: the memory is there for the CPU, and for lanes once it is
        ``settled``.
        """
        sizes = _whole_regions(parse_bytes(capacity)) if not isinstance(capacity, Sequence) else capacity
        self.capacity_bytes = sum(sizes)
        self.tag = tag
        self._regions: list[_Region] = []
        reservation = ledger.reserve(Tier.HOST, tag, self.capacity_bytes)
        self._hold = _Hold(reservation, page_lock, behind=lock_behind)

        def touched() -> Iterator[_Region]:
            for index, size in enumerate(size for size in sizes if size):
                region = _map_shared(index, size) if shared else _map_private(index, size, fork=page_lock is None)
                self._hold.add(region)
                self._regions.append(region)
                first_touch(region.address, size)
                yield region

        try:
            self._finish(touched(), behind=lock_behind)
        except BaseException:
            with contextlib.suppress(StormError):  # an interrupted lock may or may not have happened
                self._hold.end_all()
            raise

    @classmethod
    def attach(cls, shared: SharedArena, *, page_lock: PageLock | None = None) -> HostArena:
        """Map an arena that another process made with ``shared=True``.

        Its owner carries the charge; nothing can be allocated here.
        """
        arena = cls.__new__(cls)
        arena.capacity_bytes = sum(shared.region_bytes)
        arena.tag = Tag.STAGING
        arena._regions = []
        arena._hold = _Hold(None, page_lock)
        try:
            for index, (descriptor, size) in enumerate(zip(shared.descriptors, shared.region_bytes, strict=True)):
                arena._regions.append(_attach(index, shared.pid, descriptor, size))
                arena._hold.add(arena._regions[-1])
            arena._finish(arena._regions)
        except BaseException:
            with contextlib.suppress(StormError):
                arena._hold.end_all()
            raise
        return arena

    def _finish(self, regions: Iterable[_Region], *, behind: bool = False) -> None:
        self._lock = threading.Lock()
        self._returned: deque[tuple[_Region, int, int]] = deque()
        self._closed = False
        self._hold.lock(regions)
        if not behind:
            self.settle()
            if self._hold.refusal is not None and _settle_others(self._hold):
                self._hold.lock(self._regions)  # others may have held what they have given back since
                self.settle()
            self.say_if_refused()

    @property
    def settled(self) -> bool:
        """Whether it is known if all of it is page-locked."""
        return self._hold.outcome is None or self._hold.outcome.done()

    @property
    def pinned(self) -> bool:
        """Whether all of it is page-locked by now."""
        outcome = self._hold.outcome
        if self._closed or outcome is None or not outcome.done():
            return False
        return outcome.exception() is None and outcome.result()

    def settle(self) -> None:
        """Block until it is ``settled``."""
        if self._hold.outcome is not None:
            self._hold.outcome.result()

    def say_if_refused(self) -> None:
        """Tell the user, once, that it could not be page-locked, if it could not."""
        if self._hold.refusal is not None:
            self._hold.say_refused(self._hold.refusal)

    @property
    def taken_bytes(self) -> int:
        """Bytes in live blocks."""
        with self._locked():
            return sum(region.extents.taken_bytes for region in self._regions)

    def allocate(self, size: int, *, alignment: int | None = None) -> HostBlock:
        """A block of exactly ``size`` bytes. Raises OutOfBudget if no hole of the arena is large enough."""
        if self._closed:
            raise StormError("Cannot allocate from a host arena that was closed.")
        size = parse_bytes(size)
        if size == 0:
            return HostBlock(self, None, 0, 0)
        with self._locked():
            for region in self._regions:
                offset = region.extents.take(size, alignment or natural_alignment(size))
                if offset is not None:
                    return HostBlock(self, region, offset, size)
        if size > _REGION_LIMIT:
            raise SettingError(
                f"Cannot allocate {format_bytes(size)} in one piece: page-locked memory comes in regions of "
                f"{format_bytes(_REGION_LIMIT)}. Use several smaller pieces."
            )
        raise OutOfBudget(
            f"Cannot allocate {format_bytes(size)} for {self.tag.name} from a host arena",
            f"{format_bytes(self.taken_bytes)} of {format_bytes(self.capacity_bytes)} taken, no hole is large enough",
            "The limit is the size that the arena was planned with.",
            "Plan it with regions_for the sizes that it must hold.",
        )

    def tensor(self, shape: Iterable[int], dtype: torch.dtype, *, alignment: int | None = None) -> torch.Tensor:
        """A tensor for the life of the arena, where nobody will release the block."""
        shape = tuple(parse_bytes(length) for length in shape)
        return self.allocate(math.prod(shape) * dtype.itemsize, alignment=alignment).tensor(dtype, shape)

    def at(self, place: tuple[int, int, int], dtype: torch.dtype, shape: Iterable[int] | None = None) -> torch.Tensor:
        """The tensor at a ``HostBlock.place`` of this arena, or of the arena that this one is attached to."""
        region, offset, size = place
        return _view(self._regions[region].bytes if size else _NOTHING, offset, size, dtype, shape)

    def share(self) -> SharedArena:
        """The name by which another process of this user can attach the arena.

        Only for arenas made with ``shared=True``.
        """
        descriptors = tuple(region.descriptor for region in self._regions if region.descriptor is not None)
        if len(descriptors) != len(self._regions):
            raise SettingError("Only a host arena made with shared=True can be shared.")
        return SharedArena(os.getpid(), descriptors, tuple(region.size for region in self._regions))

    def check(self) -> None:
        """Assert that free and taken pieces tile the arena."""
        with self._locked():
            for region in self._regions:
                region.extents.check()

    def close(self) -> None:
        """Unlock the pages and return the charge. All copies from and to the arena must have ended. Safe to call twice.

        The memory itself goes when the last tensor made from it does.
        """
        self._closed = True
        try:
            self._hold.end_all()
        finally:
            self._regions = []

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            while self._returned:
                region, offset, size = self._returned.popleft()
                region.extents.give(offset, size)
            yield

    def _give(self, region: _Region, offset: int, size: int) -> None:
        """Put a block aside; the next call that holds the lock takes it back.

        Blocks are released by finalizers too, and those may run on this very thread while it holds the lock.
        """
        self._returned.append((region, offset, size))


class _Region:
    """One mapping. ``bytes``, and every view made from it, keeps it alive."""

    __slots__ = ("bytes", "descriptor", "extents", "index", "pages", "size")

    def __init__(self, index: int, mapping: mmap.mmap, start: int, size: int, descriptor: int | None = None) -> None:
        self.index, self.size, self.descriptor = index, size, descriptor
        self.extents = Extents(size, grain=_GRAIN)
        # Through a ctypes array, not from the mmap itself: its finalizer runs before the mapping ends, an mmap's after.
        self.pages = (ctypes.c_ubyte * size).from_buffer(mapping, start)
        with torch.inference_mode(False):  # or a caller in that mode would get memory that lanes may not write
            self.bytes = torch.frombuffer(self.pages, dtype=torch.uint8)

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def _whole_regions(capacity_bytes: int) -> list[int]:
    whole, rest = divmod(round_up(capacity_bytes, PAGE), _REGION_LIMIT)
    return [_REGION_LIMIT] * whole + [rest]


def _view(data: torch.Tensor, offset: int, size: int, dtype: torch.dtype, shape: Iterable[int] | None) -> torch.Tensor:
    flat = data[offset : offset + size].view(dtype)
    return flat if shape is None else flat.view(torch.Size(shape))


def _map_private(index: int, size: int, *, fork: bool) -> _Region:
    """Anonymous memory aligned to huge pages.

    The slack for the alignment is never touched, so it costs addresses only.
    """
    try:
        mapping = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OutOfBudget(
            f"Cannot map {format_bytes(size)} of RAM",
            f"the system refused: {error.strerror}",
            "The limit is the system's, not ram.",
            "Raise ulimit -v, or vm.overcommit_memory, or lower ram.",
        ) from error
    start = -ctypes.addressof(ctypes.c_ubyte.from_buffer(mapping)) % _HUGE_PAGE
    whole = round_down(size, _HUGE_PAGE)  # the tail stays in small pages: a huge one would exceed what was charged
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without transparent huge pages refuses: small ones work as well, only more slowly to lock.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE, start, whole)
    if not fork:
        # A fork copies page-locked memory at once, all of it, for each worker of a data loader. The child gets none.
        mapping.madvise(mmap.MADV_DONTFORK)
    return _Region(index, mapping, start, size)


def _map_shared(index: int, size: int) -> _Region:
    """Memory in an anonymous file: no name, no use of /dev/shm, gone with its last user."""
    descriptor = os.memfd_create("stormtorch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        return _Region(index, mmap.mmap(descriptor, size), 0, size, descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _attach(index: int, pid: int, descriptor: int, size: int) -> _Region:
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SettingError(
            f"Cannot attach the shared arena of process {pid}: {error.strerror}. It must run, with the arena open."
        ) from error
    try:
        region = _Region(index, mmap.mmap(opened, size), 0, size, opened)
    except BaseException:
        os.close(opened)
        raise
    region.extents = Extents(0)  # what is free is the owner's to know
    return region


class _Hold:
    """What an arena must give back: page-locks, descriptors, the charge. Each region's end is tied to its last tensor.

    The ties are made before anything is locked, so that an interrupt at any moment leaves nothing locked behind.
    """

    def __init__(self, reservation: Reservation | None, page_lock: PageLock | None, *, behind: bool = False) -> None:
        self.reservation, self.page_lock, self.behind = reservation, page_lock, behind
        self.owner_pid = os.getpid()
        self.locked: set[int] = set()
        self.locking, self.is_over = threading.Lock(), False
        self.outcome: Future[bool] | None = None  # whether all is locked; None where nothing is to be
        self.refusal: StormError | None = None
        self.size_bytes = 0
        self.finalizers: list[weakref.finalize[[int, int | None], ctypes.Array[ctypes.c_ubyte]]] = []

    def add(self, region: _Region) -> None:
        """From here on the tensors of ``region`` alone keep it."""
        finalizer = weakref.finalize(region.pages, self._end, region.address, region.descriptor)
        finalizer.atexit = False  # a GPU may still be at work then; the end of the process unlocks in the right order
        self.finalizers.append(finalizer)
        self.size_bytes += region.size
        del region.pages

    def lock(self, regions: Iterable[_Region]) -> None:
        """Page-lock all regions or none, each while the next one is being made; ``outcome`` says which. Returns when
        all are made."""
        if self.page_lock is None:
            deque(regions, maxlen=0)
            return
        self.refusal, made = None, list[_Region]()
        locker = ThreadPoolExecutor(1, "storm-page-lock")
        try:
            asked = []
            for region in regions:
                made.append(region)
                asked.append(locker.submit(self._lock_one, self.page_lock, region))
            self.outcome = locker.submit(self._conclude, asked, made)
            if self.behind:
                _BEHIND.add(self)
        finally:
            locker.shutdown(wait=False)

    def _lock_one(self, page_lock: PageLock, region: _Region) -> None:
        with self.locking:
            if self.is_over or self.refusal is not None:
                return
            self.locked.add(region.address)
            try:
                page_lock.lock(region.address, region.size)
            except StormError as refusal:
                self.locked.remove(region.address)
                self.refusal = refusal

    def _conclude(self, asked: list[Future[None]], regions: list[_Region]) -> bool:  # noqa: ARG002
        """Whether all are locked; if not, none is. ``regions``: kept until then, or their memory could go while it is
        being unlocked."""
        for future in asked:
            future.result()
        with self.locking:
            if not self.is_over and self.refusal is None:
                if self.reservation is not None:
                    self.reservation.pinned = True
                return True
            with contextlib.suppress(StormError):  # of a device that has failed, its owner was told
                self._unlock_all()
            if self.is_over and self.reservation is not None:  # an interrupted ``end_all`` may not have come to it
                self.reservation.release()
        return False

    def say_refused(self, refusal: StormError) -> None:
        instead = "Optimizer states stay with the CPU" if self.behind else "Copies go through a small page-locked ring"
        say_once(
            f"Host page-lock refused for {format_bytes(self.size_bytes)} ({refusal}); the limit is "
            f"{limits.page_lock_limit()}. {instead} instead, more slowly.",
            key="page-lock refused",
        )

    def end_all(self) -> None:
        """End what has not ended. Goes through to the last region, then raises the first error."""
        self.is_over = True
        if self.owner_pid == os.getpid():  # a forked child has not the thread, but perhaps the lock that it held
            with self.locking:  # another thread may be at it still, and can be undone only then
                pass
        errors = []
        for finalizer in self.finalizers:
            try:
                finalizer()
            except StormError as error:
                errors.append(error)
        if self.reservation is not None:
            self.reservation.release()
        if errors:
            raise errors[0]

    def _end(self, address: int, descriptor: int | None) -> None:
        try:
            # A forked child inherits this object, but the lock is its parent's.
            if self.owner_pid == os.getpid() and not sys.is_finalizing():
                self._unlock(address)
        finally:
            if descriptor is not None:
                os.close(descriptor)
            if self.reservation is not None and not any(finalizer.alive for finalizer in self.finalizers):
                self.reservation.release()

    def _unlock_all(self) -> None:
        for address in tuple(self.locked):
            self._unlock(address)

    def _unlock(self, address: int) -> None:
        """Whoever takes it out of the set unlocks it: the thread that locks, or whoever ends the region."""
        try:
            self.locked.remove(address)
        except KeyError:
            return
        assert self.page_lock is not None
        self.page_lock.unlock(address)


_BEHIND: weakref.WeakSet[_Hold] = weakref.WeakSet()  # those that a thread locks, or has locked


def _settle_others(asking: _Hold) -> bool:
    """Block until nobody is locking behind. True if somebody was: what is refused then may not be any more."""
    others = [hold.outcome for hold in list(_BEHIND) if hold is not asking and hold.outcome is not None]
    pending = [outcome for outcome in others if not outcome.done()]
    wait(pending)
    return bool(pending)
