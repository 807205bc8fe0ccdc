"""System calls of files, and what their errors mean in words.

The calls go through one small object, so that a test can make a disk fail, fill up or answer slowly at a chosen point.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import StorageError
from ...native.moves import Move, read_at, write_at
from ..books import limits

ELSEWHERE = "or name a directory on another disk."
_CAUSES = {
    errno.EIO: ("the disk reported an I/O error", f"Look at dmesg and the health of the disk, {ELSEWHERE}"),
    errno.ENOSPC: ("no space is left on the filesystem", f"Free space there, {ELSEWHERE}"),
    errno.EDQUOT: ("the disk quota is used up", f"Free space there, have the quota raised, {ELSEWHERE}"),
    errno.EFBIG: ("the file would be larger than allowed", f"Raise ulimit -f, {ELSEWHERE}"),
    errno.EROFS: ("the filesystem is read-only", "Remount it writable, or name another directory."),
    errno.EACCES: ("permission is denied", "Change the permissions, or name another directory."),
    errno.EPERM: ("the operation is not permitted", "Change the permissions, or name another directory."),
    errno.ENOENT: ("it does not exist", "Create it, or correct the path."),
    errno.ENOTDIR: ("a part of the path is not a directory", "Correct the path."),
    errno.EISDIR: ("it is a directory", "Name a file."),
    errno.EEXIST: ("it exists already", "Remove it, or give another name."),
    errno.EMFILE: ("this process has too many open files", "Raise ulimit -n, or close some."),
    errno.EINVAL: ("the kernel refused the arguments", "Try direct=False."),
}


_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # sync_file_range


def _open_unnamed(directory: str) -> int:
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        return os.dup(file.fileno())


def _set_direct(fd: int, on: bool) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


def write_out(fd: int, offset: int, size: int, wait: bool) -> None:
    """Make the kernel write a range of a file; ``wait`` until it has. Only `sync` makes the range durable."""
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "sync_file_range"):
        flags = _WAIT_BEFORE | _WRITE | _WAIT_AFTER if wait else _WRITE
        if library.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size), ctypes.c_uint(flags)):
            code = ctypes.get_errno()
            if code not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):  # the kernel reports a disk error only once
                raise OSError(code, os.strerror(code))


@dataclass(frozen=True, kw_only=True)
class SystemCalls:
    """The system calls of files, here and in checkpoints. Only tests replace a member. Python repeats interrupted
    calls."""

    open: Callable[[str, int, int], int] = os.open
    open_unnamed: Callable[[str], int] = _open_unnamed
    fallocate: Callable[[int, int, int], None] = os.posix_fallocate
    pread: Move = read_at
    pwrite: Move = write_at
    set_direct: Callable[[int, bool], None] = _set_direct
    filesystem_type: Callable[[Path], str] = limits.filesystem_type


def storage_error(what: str, cause: OSError, *, numbers: str = "") -> StorageError:
    """``cause`` as one line: what failed, why, the numbers, what to do. Keeps ``errno`` and chains ``cause``."""
    reason, remedy = _CAUSES.get(cause.errno or 0, (cause.strerror or str(cause), f"Try again, {ELSEWHERE}"))
    code = errno.errorcode.get(cause.errno or 0, "no errno")
    error = StorageError(f"Cannot {what}: {reason} [{code}]{numbers and f' ({numbers})'}. {remedy}")
    error.errno = cause.errno
    error.__cause__ = cause
    return error


@contextlib.contextmanager
def storage_errors(what: str, *, numbers: str = "") -> Iterator[None]:
    """Raise an OSError of the block as `storage_error`, unless it is a StorageError already."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(what, error, numbers=numbers) from error
