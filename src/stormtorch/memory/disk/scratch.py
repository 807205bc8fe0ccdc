"""Scratch: one preallocated file without a name, divided into extents.

It is unnamed from the start, or loses its name at once: the kernel frees the space when the process ends, however it
ends, and no later run can read what an earlier one left. The road not taken: a directory of files named by tensor. They
pile up after a crash, and each of them can fail to be created in the middle of training.
"""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Unpack

from ...core.errors import OutOfBudget, SettingError
from ...core.notices import say_once
from ...core.sizes import format_bytes, parse_bytes, round_up
from ...core.tags import Tag, Tier
from ..books import limits
from ..books.ledger import Ledger, Reservation
from .calls import SystemCalls, storage_error
from .files import ALIGNMENT, File, FileOptions, Transfer, Transfers, owned
from .filesystems import Place, place_of


class FileExtent(Transfers):
    """``size_bytes`` at ``offset`` of a scratch file, until that is closed. Offsets start at its own 0."""

    __slots__ = ("file", "offset", "size_bytes")

    def __init__(self, file: ScratchFile, offset: int, size_bytes: int) -> None:
        self.file, self.offset, self.size_bytes = file, offset, size_bytes

    def _start(self, view: memoryview, offset: int, *, write: bool) -> Transfer:
        end = offset + len(view)
        if offset < 0 or end > self.size_bytes:
            raise SettingError(f"Bytes {offset} to {end} are not inside an extent of {self.size_bytes} bytes.")
        # An extent ends with its own padding.
        return self.file.begin(view, self.offset + offset, write=write, padded=end == self.size_bytes)


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
        kind = calls.filesystem_type(directory)
        if place_of(kind) in (Place.NETWORK, Place.HOST, Place.PROGRAM):
            say_once(
                f"{directory} is on {kind}, which is not a disk of this machine: what lies there is read and written "
                "through it all the time. Name a directory on a local disk, preferably NVMe."
            )
        with owned(number) as raw:
            self._release = weakref.finalize(raw, reservation.release)
            _preallocate(number, size_bytes, directory, calls)
            super().__init__(raw, name, where=directory, size_bytes=size_bytes, writable=True, **options)
            self._taken_bytes, self._extents_lock = 0, threading.Lock()

    def close(self, *, cancel: bool = False) -> None:
        try:
            super().close(cancel=cancel)
        finally:
            if self.raw.closed:  # an interrupted close still holds the descriptor, and with it the space
                self._release()

    @property
    def free_bytes(self) -> int:
        """Bytes that are not taken. An extent takes whole alignment units."""
        return self.size_bytes - self._taken_bytes

    def take(self, size: int) -> FileExtent:
        """Take an extent of ``size`` bytes at an aligned offset, or raise OutOfBudget. Its content is undefined."""
        self.refuse_after_fork()
        size_taken = round_up(parse_bytes(size), ALIGNMENT)
        with self._extents_lock:
            if size_taken > self.free_bytes:
                raise OutOfBudget(
                    f"Cannot take {format_bytes(size)} of the {self.name}",
                    f"{format_bytes(self._taken_bytes)} of {format_bytes(self.size_bytes)} taken",
                    "The limit is the size that the file was created with.",
                    "Create it larger.",
                )
            offset = self._taken_bytes
            self._taken_bytes += size_taken
        return FileExtent(self, offset, size)


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
