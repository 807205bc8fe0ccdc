"""Scratch: one preallocated file without a name, divided into extents.

It is unnamed from the start, or loses its name at once: the kernel frees the space when the process ends, however it
ends, and no later run can read what an earlier one left. The road not taken: a directory of files named by tensor. They
pile up after a crash, and each of them can fail to be created in the middle of training.

A finalizer may give space back: the garbage collector runs it at any point, hence also on a thread that is inside
``take`` and holds the lock. So ``give_back`` takes no lock. It appends to a queue, which is one atomic step, and the
next holder of the lock frees what is in the queue before anything else; callers see no difference. The road not taken:
a re-entrant lock. It would let the finalizer in while the lists of extents are half changed.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Unpack

from ...core.errors import OutOfBudget, SettingError, StorageError
from ...core.sizes import format_bytes, parse_bytes, round_up
from ...core.tags import Tag, Tier
from ...native.rows.jobs import PENDING, RowsJob
from ..books import limits
from ..books.extents import Extents
from ..books.ledger import Ledger, Reservation
from .calls import SystemCalls, storage_error
from .files import ALIGNMENT, File, FileOptions, Transfer, Transfers, owned


class _Place:
    """An extent's position and uses. It refers to no file, so that a queue of places does not keep one alive."""

    __slots__ = ("given", "jobs", "offset", "size_bytes", "taken")

    def __init__(self, offset: int, size_bytes: int) -> None:
        self.offset, self.size_bytes = offset, size_bytes  # as in the file's extents
        self.given, self.taken = False, True
        self.jobs: list[RowsJob] = []  # of requests that may still run


class FileExtent(Transfers):
    """``size_bytes`` at ``offset`` of a scratch file, the caller's until ``give_back``. Offsets start at its own 0."""

    __slots__ = ("_place", "file", "offset", "size_bytes")

    def __init__(self, file: ScratchFile, place: _Place, size_bytes: int) -> None:
        self.file, self.offset, self.size_bytes = file, place.offset, size_bytes
        self._place = place

    def give_back(self) -> None:
        """Return the space; its content is lost. Space that a request still uses follows when that ends. Idempotent.

        Takes no lock: a finalizer may call it, at any moment and on any thread.
        """
        self.file._given_back.append(self._place)
        self._place.given = True

    def _start(self, view: memoryview, offset: int, *, write: bool) -> Transfer:
        end = offset + len(view)
        if offset < 0 or end > self.size_bytes:
            raise SettingError(f"Bytes {offset} to {end} are not inside an extent of {self.size_bytes} bytes.")
        file, place = self.file, self._place
        file.refuse_after_fork()
        # An extent ends with its own padding.
        transfer = Transfer(file, view, self.offset + offset, write=write, padded=end == self.size_bytes)
        with file._extents_lock:
            if place.given:
                raise StorageError(f"Cannot use an extent of the {file.name}: it was given back. Take a new one.")
            # Before it begins: Ctrl-C may come right after that.
            place.jobs = [*(job for job in place.jobs if job.outcome.state == PENDING), transfer.job]
            return file.begin(transfer)


class ScratchFile(File):
    """Space on disk, charged to a ledger, that lasts as long as this object is open."""

    def __init__(
        self, directory: Path, size_bytes: int, reservation: Reservation, **options: Unpack[FileOptions]
    ) -> None:
        """Takes ``reservation`` over, unless this raises. Users call ``create_scratch``."""
        calls, name = options.get("calls", SystemCalls()), f"scratch file in {directory}"
        try:
            number = calls.open_unnamed(str(directory))
        except OSError as error:
            raise storage_error(f"create a {name}", error) from error
        with owned(number) as raw:
            self._release = weakref.finalize(raw, reservation.release)
            _preallocate(number, size_bytes, directory, calls)
            super().__init__(raw, name, where=directory, size_bytes=size_bytes, writable=True, **options)
            self._extents = Extents(size_bytes)
            self._extents_lock = threading.Lock()
            self._given_back: deque[_Place] = deque()  # and not yet free

    def close(self, *, cancel: bool = False) -> None:
        try:
            super().close(cancel=cancel)
        finally:
            if self.raw.closed:  # an interrupted close still holds the descriptor, and with it the space
                self._release()

    @property
    def free_bytes(self) -> int:
        """Bytes that are not taken. An extent takes whole alignment units."""
        self.refuse_after_fork()
        with self._extents_lock:
            self._free_given_back()
            return self.size_bytes - self._extents.taken_bytes

    def take(self, size: int) -> FileExtent:
        """Take an extent of ``size`` bytes at an aligned offset, or raise OutOfBudget. Its content is undefined."""
        self.refuse_after_fork()
        size_taken = round_up(parse_bytes(size), ALIGNMENT)
        with self._extents_lock:
            self._free_given_back()
            offset = self._extents.take(size_taken, ALIGNMENT)
            free = self.size_bytes - self._extents.taken_bytes
        if offset is None:
            taken = f"{format_bytes(self.size_bytes - free)} of {format_bytes(self.size_bytes)} taken"
            raise OutOfBudget(
                f"Cannot take {format_bytes(size)} of the {self.name}",
                taken if size_taken > free else f"{taken}, and no hole is large enough",
                "The limit is the size that the file was created with.",
                "Create it larger, or give extents back.",
            )
        return FileExtent(self, _Place(offset, size_taken), size)

    def check(self) -> None:
        """Assert conservation: taken and free extents tile the file."""
        self.refuse_after_fork()
        with self._extents_lock:
            self._free_given_back()
            self._extents.check()

    def _free_given_back(self) -> None:
        """Bring the extents up to date; the caller holds the lock. Removes an entry last, lest Ctrl-C lose it."""
        for _ in range(len(self._given_back)):
            place = self._given_back[0]
            # The next user may take the place only when no thread reads or writes it for this one.
            if any(job.outcome.state == PENDING for job in place.jobs):
                self._given_back.rotate(-1)
                continue
            place.given = True
            if place.taken:  # else it was given back twice
                place.taken = False
                self._extents.give(place.offset, place.size_bytes)
            self._given_back.popleft()


def create_scratch(
    directory: Path | str, size: int, *, ledger: Ledger, tag: Tag, **options: Unpack[FileOptions]
) -> ScratchFile:
    """Create a scratch file of ``size`` bytes, rounded up to the alignment, in an existing ``directory``.

    Charges ``ledger`` before the file exists and until it is closed. If it raises, nothing is left or charged.
    """
    size_bytes = round_up(parse_bytes(size), ALIGNMENT)
    reservation = ledger.reserve(Tier.DISK, tag, size_bytes)
    try:
        return ScratchFile(Path(directory), size_bytes, reservation, **options)
    except BaseException:
        reservation.release()
        raise


def _preallocate(number: int, size: int, directory: Path, calls: SystemCalls) -> None:
    """Allocate ``[0, size)`` of a new file on the disk, so that a full disk is noticed now, not hours later."""
    free = limits.disk_bytes(directory)[0]  # read first: a failed attempt may keep its space for a while
    try:
        if size:
            calls.fallocate(number, 0, size)
    except OSError as error:
        numbers = f"{format_bytes(free)} were free"
        what = f"preallocate {format_bytes(size)} for scratch file in {directory}"
        raise storage_error(what, error, numbers=numbers) from error
