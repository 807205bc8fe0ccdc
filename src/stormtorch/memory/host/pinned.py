"""Page-locks and the ledger's charge of an arena, given back together. A thread may make the locks in the
background."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from ...core.endings import Endings
from ...core.errors import OutOfBudget, StormError
from ...core.notices import say_once
from ...core.sizes import format_bytes
from ...core.tags import Tag
from ...native.touch import can_touch_beside_writers, first_touch
from ..books import limits
from ..books.ledger import Ledger, Reservation
from .pinning import PageLock
from .region import Region

_PAUSE_S = 0.002  # between two regions that are locked in the background: other threads call the driver too


class Hold:
    """An arena's page-locks, descriptors and charge. Each region's end is tied to its last tensor. The ties are made
    before anything is locked, so that an interrupt at any moment leaves nothing locked."""

    def __init__(self, reservation: Reservation, page_lock: PageLock | None, *, behind: bool = False) -> None:
        self.reservation, self.page_lock, self.behind = reservation, page_lock, behind
        # Whether the locking thread touches the pages; else the code that maps them does.
        self.touches = behind and page_lock is not None and can_touch_beside_writers()
        self.owner_pid = os.getpid()
        self.locked: set[int] = set()
        self.locking, self.is_over = threading.Lock(), False
        self.outcome: Future[bool] = Future()  # of the locking thread: whether all is locked
        self.outcome.set_result(False)
        self.refusal: StormError | None = None
        self.size_bytes = 0
        self.finalizers: list[weakref.finalize[[int, int | None], ctypes.Array[ctypes.c_ubyte]]] = []

    def add(self, region: Region) -> None:
        """Tie ``region`` to its tensors, which alone keep it from here on."""
        finalizer = weakref.finalize(region.pages, self._end, region.address, region.descriptor)
        # A GPU may still be working at exit; the end of the process unlocks in the right order.
        finalizer.atexit = False
        self.finalizers.append(finalizer)
        self.size_bytes += region.size
        del region.pages

    def lock(self, regions: Iterable[Region]) -> None:
        """Page-lock all regions or none, each while the next one is being made; ``outcome`` says which. Returns when
        all are made."""
        if self.page_lock is None:
            deque(regions, maxlen=0)
            return
        self.refusal, made = None, list[Region]()
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

    def _lock_one(self, page_lock: PageLock, region: Region) -> None:
        if self.touches and not self.is_over and self.refusal is None:
            first_touch(region.address, region.size)
        if self.behind:
            time.sleep(_PAUSE_S)
        with self.locking:
            if self.is_over or self.refusal is not None:
                return
            self.locked.add(region.address)
            try:
                page_lock.lock(region.address, region.size)
            except StormError as refusal:
                self.locked.remove(region.address)
                self.refusal = refusal.with_traceback(None)  # a traceback would keep ``region``, and with it the memory

    def _conclude(self, asked: list[Future[None]], regions: list[Region]) -> bool:  # noqa: ARG002
        """Whether all are locked; if not, unlocks all. ``regions`` are kept until then: their memory must not go while
        it is being unlocked."""
        for future in asked:
            future.result()
        with self.locking:
            if not self.is_over and self.refusal is None:
                self.reservation.pinned = True
                return True
            with contextlib.suppress(StormError):  # of a device that has failed, which was reported already
                for address in tuple(self.locked):
                    self._unlock(address)
            if self.is_over:  # an interrupted ``end_all`` may not have released it
                self.reservation.release()
        return False

    def say_if_refused(self) -> None:
        """Tell the user, once, if locking was refused."""
        if self.refusal is None:
            return
        instead = "Optimizer states remain on the CPU" if self.behind else "Copies go through a small page-locked ring"
        say_once(
            f"Host page-lock refused for {format_bytes(self.size_bytes)} ({self.refusal}); the limit is "
            f"{limits.page_lock_limit()}. {instead} instead, more slowly.",
            key="page-lock refused",
        )

    def end_all(self) -> None:
        """End all regions that have not ended. Continues after an error, then raises the first one."""
        self.is_over = True
        # A forked child does not have the thread, but may have a copy of the lock in its hold.
        if self.owner_pid == os.getpid():
            with self.locking:  # another thread may still be locking, which can be undone only afterwards
                pass
        endings = Endings()
        for finalizer in self.finalizers:
            endings.after_others(finalizer)
        endings.last(self.reservation.release)
        endings.run()

    def _end(self, address: int, descriptor: int | None) -> None:
        try:
            # A forked child inherits this object, but the page-lock belongs to its parent.
            if self.owner_pid == os.getpid() and not sys.is_finalizing():
                self._unlock(address)
        finally:
            if descriptor is not None:
                os.close(descriptor)
            if not any(finalizer.alive for finalizer in self.finalizers):
                self.reservation.release()

    def _unlock(self, address: int) -> None:
        """Unlock a region once: done by the thread that removes it from the set, the locking or the ending one."""
        try:
            self.locked.remove(address)
        except KeyError:
            return
        assert self.page_lock is not None
        self.page_lock.unlock(address)


def cannot_lock(size_bytes: int, tag: Tag, ledger: Ledger, remedy: str) -> OutOfBudget:
    """The error for callers that cannot use pageable memory."""
    return OutOfBudget(
        f"Cannot page-lock {format_bytes(size_bytes)} more of RAM for {tag.name}",
        f"{format_bytes(ledger.pinned_bytes)} are page-locked already",
        f"The limit is {limits.page_lock_limit()}.",
        f"Raise it, or {remedy}.",
    )


_BEHIND: weakref.WeakSet[Hold] = weakref.WeakSet()  # those that a background thread locks, or has locked


def settle_others(asking: Hold) -> bool:
    """Block until no other background locking runs. True if one did: a lock that was refused may succeed now."""
    pending = [hold.outcome for hold in list(_BEHIND) if hold is not asking and not hold.outcome.done()]
    wait(pending)
    return bool(pending)
