"""File system calls of checkpoints, in one replaceable object, and files with checksums.

Tests replace `CALLS` with an object that fails, fills up, is slow, or kills the process at a chosen call. All I/O goes
through the page cache, because tensors in a file are neither aligned nor padded. The writer makes the kernel write each
window of 32 MiB at once, while it copies the next one, and drops pages that are on the disk. So a save does not flood
the cache, overlaps the disk with the processor, and does not end in one long fsync.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import sys
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...core.endings import Closing
from ...core.errors import CheckpointError, StorageError
from ...core.sizes import MiB, format_bytes
from ...memory.disk.calls import SystemCalls, storage_error, storage_errors, write_out

CHUNK = 8 * MiB
_WINDOW = 32 * MiB
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _exchange(one: str, other: str) -> None:
    """Swap two names in one step. Raises OSError if the system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if library.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), one)


def _free(directory: str) -> int:
    usage = shutil.disk_usage(directory)
    return usage.free if usage.total else sys.maxsize  # some FUSE file systems report 0


@dataclass(frozen=True, kw_only=True)
class DiskCalls(SystemCalls):
    """The system calls of checkpoints: those of files, and those of folders."""

    mkdir: Callable[[str], None] = os.mkdir
    write_out: Callable[[int, int, int, bool], None] = write_out
    sync: Callable[[int], None] = os.fsync  # of files and folders
    rename: Callable[[str, str], None] = os.rename
    exchange: Callable[[str, str], None] = _exchange
    remove: Callable[[str], None] = shutil.rmtree
    free_bytes: Callable[[str], int] = _free


CALLS = DiskCalls()


@dataclass(frozen=True)
class Record:
    """The manifest's entry of a file."""

    size: int
    crc: int


class Stopped(Exception):
    """The caller cancelled the rest of the work. Never leaves the package."""


class FileWriter(Closing):
    """Writes a new file from the front, and computes its checksum."""

    def __init__(self, path: Path, stop: threading.Event | None = None) -> None:
        self.path, self._stop = path, stop
        self._size = self._crc = self._begun = self._dropped = 0
        try:
            self._fd = CALLS.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise storage_error(f"create {path}", error) from error

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data).cast("B")
        for at in range(0, len(view), CHUNK):
            self._write_chunk(view[at : at + CHUNK])

    def _write_chunk(self, chunk: memoryview) -> None:
        if self._stop is not None and self._stop.is_set():
            raise Stopped
        self._crc = zlib.crc32(chunk, self._crc)
        try:
            while len(chunk):
                written = CALLS.pwrite(self._fd, chunk, self._size)
                if written <= 0:
                    raise OSError(errno.EIO, "nothing was written")
                self._size += written
                chunk = chunk[written:]
            if self._size - self._begun >= _WINDOW:
                self._move_window()
        except OSError as error:
            raise self._failed("write", error) from error

    def _move_window(self) -> None:
        """Start writing the new window to the disk, and wait for the previous one."""
        CALLS.write_out(self._fd, self._begun, self._size - self._begun, False)
        if self._begun > self._dropped:
            CALLS.write_out(self._fd, self._dropped, self._begun - self._dropped, True)
            self._drop(self._begun)
        self._begun = self._size

    def _drop(self, end: int) -> None:
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fd, self._dropped, end - self._dropped, os.POSIX_FADV_DONTNEED)
        self._dropped = end

    def finish(self) -> Record:
        """Fsync the file."""
        try:
            CALLS.sync(self._fd)
            self._drop(self._size)
        except OSError as error:
            raise self._failed("sync", error) from error
        return Record(self._size, self._crc)

    def close(self) -> None:
        """Close, complete or not."""
        os.close(self._fd)

    def _failed(self, what: str, error: OSError) -> StorageError:
        numbers = f"{format_bytes(self._size)} written"
        with contextlib.suppress(OSError):
            numbers += f", {format_bytes(CALLS.free_bytes(str(self.path.parent)))} free"
        return storage_error(f"{what} {self.path}", error, numbers=numbers)


def write_file(path: Path, data: bytes) -> Record:
    """Write a new small file and fsync it."""
    with FileWriter(path) as file:
        file.write(data)
        return file.finish()


def sync_folder(path: Path) -> None:
    """Fsync a folder: the names in it become durable."""
    with storage_errors(f"sync the folder {path}"):
        fd = CALLS.open(str(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0)
        try:
            CALLS.sync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot sync folders
                raise
        finally:
            os.close(fd)


class FileReader(Closing):
    """Reads a plain file from the front, and computes its checksum."""

    def __init__(self, path: Path, stop: threading.Event | None = None, *, sums: bool = True) -> None:
        """Without ``sums`` it computes no checksum, and reads nothing that is skipped."""
        self.path, self._stop, self._sums = path, stop, sums
        self.at = self._crc = 0
        try:
            # NONBLOCK: opening a pipe would wait for its writer.
            self._fd = CALLS.open(str(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, 0)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing. Copy it there, or use another folder.") from None
        except OSError as error:
            raise storage_error(f"open {path}", error) from error
        status = os.fstat(self._fd)
        self.size, self.inode = status.st_size, status.st_ino
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CheckpointError(f"{path} is not a plain file. Use another folder.")

    def read(self, data: memoryview | bytearray) -> None:
        """Fill ``data`` with the next bytes; raises if the file ends before."""
        view = memoryview(data)
        for begin in range(0, len(view), CHUNK):
            if self._stop is not None and self._stop.is_set():
                raise Stopped
            chunk = view[begin : begin + CHUNK]
            self._fill(chunk)
            if self._sums:
                self._crc = zlib.crc32(chunk, self._crc)

    def _fill(self, view: memoryview) -> None:
        while len(view):
            try:
                count = CALLS.pread(self._fd, view, self.at)
            except OSError as error:
                raise storage_error(f"read {self.path}", error, numbers=f"{len(view)} bytes at {self.at}") from error
            if count <= 0:
                raise CheckpointError(
                    f"{self.path} is truncated: it ends at byte {self.at}. Copy it again, or use another one."
                )
            view, self.at = view[count:], self.at + count

    def skip_to(self, at: int) -> None:
        """Go on at byte ``at``."""
        if not self._sums:
            self.at = at
        scratch = memoryview(bytearray(max(0, min(CHUNK, at - self.at))))
        while self.at < at:
            self.read(scratch[: at - self.at])

    def finish(self) -> Record:
        """Read the rest of the file; return the manifest entry for its present content."""
        self.skip_to(self.size)
        return Record(self.size, self._crc)

    def close(self) -> None:
        os.close(self._fd)


def sync_file(path: Path) -> Record:
    """Fsync a file that other code has written; returns its manifest entry."""
    with FileReader(path) as file, storage_errors(f"sync {path}"):
        CALLS.sync(file._fd)
        return file.finish()


def read_whole(path: Path, *, limit_bytes: int) -> bytearray:
    """Read a file of at most ``limit_bytes``: a sparse file from an untrusted source may claim any size."""
    with FileReader(path, sums=False) as file:
        if file.size > limit_bytes:
            raise CheckpointError(
                f"{path} has {format_bytes(file.size)}; the limit is {format_bytes(limit_bytes)}. Copy it again, or "
                "use another folder."
            )
        data = bytearray(file.size)
        file.read(data)
        return data


def sum_of(path: Path) -> Record:
    """The manifest entry for the file's present content. Reads the whole file."""
    with FileReader(path) as file:
        return file.finish()


def check(path: Path, found: Record, expected: Record, *, remedy: str = "Use another checkpoint.") -> None:
    """Raise CheckpointError unless size and checksum are as in the manifest."""
    if found != expected:
        raise CheckpointError(
            f"{path} is damaged: checksum {found.crc:08x} of {found.size} bytes, the manifest says {expected.crc:08x} "
            f"of {expected.size}. {remedy}"
        )
