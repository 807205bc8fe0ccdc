"""Scratch: one preallocated file without a name, divided into extents.

It is unnamed from the start (``O_TMPFILE``), or loses its name at once: the kernel frees the space when the process
ends, however it ends, and no later run can read what an earlier one left. The road not taken: a directory of files
named by tensor. They pile up after a crash, and each of them can fail to be created in the middle of training.

Space comes back in two ways, and both may run in a finalizer: the garbage collector runs it at any point, hence also on
a thread that is inside ``take`` and holds the lock. So neither way takes the lock. Each appends to a queue of news,
which is one atomic step, and the next holder of the lock reads the news before anything else; callers see no
difference. The road not taken: a re-entrant lock. It would let the finalizer in while the lists of extents are half
changed.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections import deque
from functools import partial
from pathlib import Path
from typing import Unpack

from ...core.errors import OutOfBudget, SettingError, StorageError
from ...core.sizes import format_bytes, parse_bytes, round_up
from ...core.tags import Tag, Tier
from ..books import limits
from ..books.extents import Extents
from ..books.ledger import Ledger, Reservation
from .calls import Descriptor, SystemCalls, storage_error
from .files import ALIGNMENT, File, FileOptions, Transfers, closed_on_error
from .requests import Ending, Transfer

_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR})  # EISDIR: from kernels without the flag


class _Place:
    """An extent's position and uses. It refers to no file, so that news about it does not keep one alive."""

    __slots__ = ("given", "offset", "size_bytes", "taken", "uses")

    def __init__(self, offset: int, size_bytes: int) -> None:
        self.offset, self.size_bytes = offset, size_bytes  # as in the file's extents
        self.given, self.taken = False, True
        self.uses: frozenset[object] = frozenset()  # one key per running request


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
        self.file._news.append((self._place, None))

    def _submit(self, view: memoryview, offset: int, *, write: bool, stop: threading.Event | None = None) -> Transfer:
        end = offset + len(view)
        if offset < 0 or end > self.size_bytes:
            raise SettingError(f"Bytes {offset} to {end} are not inside an extent of {self.size_bytes} bytes.")
        file, place, use = self.file, self._place, object()
        file._requests.refuse_after_fork()
        ending = Ending(partial(file._news.append, (place, use)))
        try:
            with file._extents_lock:
                file._read_news()
                if place.given:
                    raise StorageError(f"Cannot use an extent of the {file.name}: it was given back. Take a new one.")
                place.uses |= {use}
            return file._submit(
                view,
                self.offset + offset,
                write=write,
                padded=end == self.size_bytes,  # an extent ends with its own padding
                ending=ending,
                stop=stop,
            )
        except BaseException:
            # Ctrl-C may come when the request has begun; its own end then makes the call, and the kernel uses the place
            # until then.
            if not ending.owed:
                ending.call()
            raise


class ScratchFile(File):
    """Space on disk, charged to a ledger, that lasts as long as this object is open."""

    def __init__(
        self, directory: Path, size_bytes: int, reservation: Reservation, **options: Unpack[FileOptions]
    ) -> None:
        """Takes ``reservation`` over, unless this raises. Users call ``create_scratch``."""
        descriptor = _open_unnamed(directory, options.get("calls", SystemCalls()))
        # By ``close``, or when dropped. An interrupted close still holds the descriptor, and with it the space.
        descriptor.freed = reservation.release
        with closed_on_error(descriptor):
            _preallocate(descriptor, size_bytes, directory)
            super().__init__(descriptor, where=directory, size_bytes=size_bytes, writable=True, **options)
            self._extents = Extents(size_bytes, grain=ALIGNMENT)
            self._extents_lock = threading.Lock()
            self._news: deque[tuple[_Place, object]] = deque()  # the key of a use that ended, or None: given back

    @property
    def free_bytes(self) -> int:
        """Bytes that are not taken. An extent takes whole alignment units."""
        self._requests.refuse_after_fork()
        with self._extents_lock:
            self._read_news()
            return self.size_bytes - self._extents.taken_bytes

    def take(self, size: int) -> FileExtent:
        """Take an extent of ``size`` bytes at an aligned offset, or raise OutOfBudget. Its content is undefined."""
        self._requests.refuse_after_fork()
        size_taken = round_up(parse_bytes(size), ALIGNMENT)
        with self._extents_lock:
            self._read_news()
            offset = self._extents.take(size_taken)
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
        self._requests.refuse_after_fork()
        with self._extents_lock:
            self._read_news()
            self._extents.check()

    def _read_news(self) -> None:
        """Bring the extents up to date; the caller holds the lock. Removes an entry last, lest Ctrl-C lose it."""
        while self._news:
            place, use = self._news[0]
            if use is None:
                place.given = True
            else:
                place.uses -= {use}
            # The next user may take the place only when the kernel no longer reads or writes it for this one.
            if place.given and not place.uses and place.taken:
                place.taken = False
                self._extents.give(place.offset, place.size_bytes)
            self._news.popleft()


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


def _preallocate(descriptor: Descriptor, size: int, directory: Path) -> None:
    """Allocate ``[0, size)`` of a new file on the disk, so that a full disk is noticed now, not hours later."""
    free = limits.disk_bytes(directory)[0]  # read first: a failed attempt may keep its space for a while
    try:
        if size:
            descriptor.calls.fallocate(descriptor.number, 0, size)
    except OSError as error:
        numbers = f"{format_bytes(free)} were free"
        raise storage_error(
            f"preallocate {format_bytes(size)} for {descriptor.name}", error, numbers=numbers
        ) from error


def _open_unnamed(directory: Path, calls: SystemCalls) -> Descriptor:
    name = f"scratch file in {directory}"
    try:
        try:
            # EXCL: it can never be given a name.
            flags = os.O_RDWR | os.O_TMPFILE | os.O_EXCL
            return Descriptor(calls.open(str(directory), flags, 0o600), name, calls)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
        path = str(directory / f".storm-scratch-{secrets.token_hex(8)}")
        descriptor = Descriptor(calls.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), name, calls)
        with closed_on_error(descriptor):
            calls.unlink(path)  # still empty: a kill between these two calls leaves a name, but no bytes
        return descriptor
    except OSError as error:
        raise storage_error(f"create a {name}", error) from error
