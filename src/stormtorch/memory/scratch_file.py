"""Scratch: one preallocated file without a name, divided into extents.

It is unnamed from the start (``O_TMPFILE``), or loses its name at once: the kernel frees the space when the process
ends, however it ends, and no later run can read back what an earlier one left. A directory of files named by tensor is
the road not taken: they pile up after a crash, and each of them can fail to be created when training is under way.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Unpack

from ..core.errors import OutOfBudget, SettingError, StorageError
from ..core.sizes import format_bytes, round_up
from ..core.tags import Tag, Tier
from .extents import Extents
from .file_calls import SystemCalls, storage_error
from .file_requests import Buffer, Transfer, bytes_of
from .files import ALIGNMENT, File, FileOptions, closed_on_error, interruptible, preallocate
from .ledger import Ledger, Reservation

_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR})  # EISDIR: kernels that do not know the flag


class FileExtent:
    """``size_bytes`` at ``offset`` of a scratch file, the caller's until ``give_back``. Offsets start at its own 0."""

    __slots__ = ("_given", "_pending", "file", "offset", "size_bytes")

    def __init__(self, file: ScratchFile, offset: int, size_bytes: int) -> None:
        self.file, self.offset, self.size_bytes = file, offset, size_bytes
        self._pending, self._given = 0, False

    def pread(self, buffer: Buffer, offset: int = 0) -> Future[int]:
        """As ``File.pread``."""
        return self.file._submit_in(self, bytes_of(buffer, writable=True), offset, write=False)

    def pwrite(self, buffer: Buffer, offset: int = 0) -> Future[int]:
        """As ``File.pwrite``."""
        return self.file._submit_in(self, bytes_of(buffer, writable=False), offset, write=True)

    def read(self, buffer: Buffer, offset: int = 0) -> int:
        """As ``File.read``; blocks."""
        with interruptible() as stop:
            view = bytes_of(buffer, writable=True)
            return self.file._submit_in(self, view, offset, write=False, stop=stop).result()

    def write(self, buffer: Buffer, offset: int = 0) -> int:
        """As ``File.write``; blocks."""
        with interruptible() as stop:
            view = bytes_of(buffer, writable=False)
            return self.file._submit_in(self, view, offset, write=True, stop=stop).result()

    def give_back(self) -> None:
        """Return the space; its content is lost. What a request still uses follows when that ends. Idempotent."""
        self.file._give_back(self)


class ScratchFile(File):
    """Space on disk that lasts as long as this object is open."""

    def __init__(
        self, directory: Path, size_bytes: int, reservation: Reservation, **options: Unpack[FileOptions]
    ) -> None:
        """Takes ``reservation`` over, unless it raises. Users call ``create_scratch``."""
        calls = options.setdefault("calls", SystemCalls())
        name = f"scratch file in {directory}"
        fd = _open_unnamed(directory, calls)
        with closed_on_error(fd, calls):
            preallocate(fd, size_bytes, name, directory, calls)
            super().__init__(fd, name, where=directory, size_bytes=size_bytes, writable=True, **options)
        self._reservation = reservation
        self._extents = Extents(size_bytes)
        self._extents_lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        """What is not taken. An extent takes whole alignment units."""
        return self.size_bytes - self._extents.taken_bytes

    def take(self, size: int) -> FileExtent:
        """An extent of ``size`` bytes at an aligned offset, or OutOfBudget. Its content is undefined."""
        with self._extents_lock:
            offset = self._extents.take(round_up(size, ALIGNMENT), ALIGNMENT)
            free = self.free_bytes
        if offset is None:
            taken = f"{format_bytes(self.size_bytes - free)} of {format_bytes(self.size_bytes)} taken"
            raise OutOfBudget(
                f"Cannot take {format_bytes(size)} of the {self.name}",
                taken if round_up(size, ALIGNMENT) > free else f"{taken}, and no hole is large enough",
                "The limit is the size that the file was created with.",
                "Create it larger, or give extents back.",
            )
        return FileExtent(self, offset, size)

    def check(self) -> None:
        """Assert conservation: taken and free extents tile the file."""
        with self._extents_lock:
            self._extents.check()

    def close(self, *, cancel: bool = False) -> None:
        """As ``File.close``; then the space is the ledger's again."""
        try:
            super().close(cancel=cancel)
        finally:
            # An interrupted close still holds the descriptor, and with it the space.
            if self._requests.fd < 0:
                self._reservation.release()

    def _submit_in(
        self, extent: FileExtent, view: memoryview, offset: int, *, write: bool, stop: threading.Event | None = None
    ) -> Transfer:
        end = offset + len(view)
        if offset < 0 or end > extent.size_bytes:
            raise SettingError(f"Bytes {offset} to {end} are not inside an extent of {extent.size_bytes} bytes.")
        with self._extents_lock:
            if extent._given:
                raise StorageError(f"Cannot use an extent of the {self.name}: it was given back. Take a new one.")
            extent._pending += 1
        try:
            return self._submit(
                view,
                extent.offset + offset,
                write=write,
                padded=end == extent.size_bytes,  # behind an extent's end lies its own padding
                ended=lambda: self._request_ended(extent),
                stop=stop,
            )
        except Exception:  # not Ctrl-C: it may come when the request has begun, which then ends by itself
            self._request_ended(extent)
            raise

    def _request_ended(self, extent: FileExtent) -> None:
        with self._extents_lock:
            extent._pending -= 1
            if extent._given and not extent._pending:
                self._extents.give(extent.offset, round_up(extent.size_bytes, ALIGNMENT))

    def _give_back(self, extent: FileExtent) -> None:
        with self._extents_lock:
            first, extent._given = not extent._given, True
            # Nobody else may take the place while the kernel still reads or writes it for this one.
            if first and not extent._pending:
                self._extents.give(extent.offset, round_up(extent.size_bytes, ALIGNMENT))


def create_scratch(
    directory: Path | str, size: int, *, ledger: Ledger, tag: Tag, **options: Unpack[FileOptions]
) -> ScratchFile:
    """A scratch file of ``size`` bytes, rounded up to the alignment, in an existing ``directory``.

    Charges ``ledger`` before the file exists and until it is closed. If it raises, nothing is left or charged.
    """
    size_bytes = round_up(size, ALIGNMENT)
    reservation = ledger.reserve(Tier.DISK, tag, size_bytes)
    try:
        return ScratchFile(Path(directory), size_bytes, reservation, **options)
    except BaseException:
        reservation.release()
        raise


def _open_unnamed(directory: Path, calls: SystemCalls) -> int:
    try:
        try:
            # EXCL: nobody can give it a name afterwards.
            return calls.open(str(directory), os.O_RDWR | os.O_TMPFILE | os.O_EXCL, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
        path = str(directory / f".storm-scratch-{secrets.token_hex(8)}")
        fd = calls.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with closed_on_error(fd, calls):
            calls.unlink(path)  # still empty: a kill between these two calls leaves a name, but no bytes
        return fd
    except OSError as error:
        raise storage_error(f"create a scratch file in {directory}", error) from error
