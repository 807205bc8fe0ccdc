"""Open files of a dataset, each opened when it is first needed, and kept open."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...core.errors import SettingError
from ...native.rows.c_rows import map_file, unmap_file
from .permutations import Rows

NOT_OPEN = (1 << 31) - 1  # no file has this number: the kernel refuses to read from it
_FACTOR = 8  # a dataset's files take at most this fraction of those that the process may open, where that is possible
_MOST_MAPS = 4096  # the kernel allows a process 65,530, and malloc needs some


def allow_open(files: int) -> None:
    """Raise the process's limit of open files, if necessary, so that ``files`` more leave room to other code."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = NOT_OPEN if hard == resource.RLIM_INFINITY else hard
    if 2 * files > most:
        raise SettingError(
            f"Cannot read from {files} files: this process may open {most}, and half of them are left to other code. "
            "Raise that limit (ulimit -Hn), or `storm data pack` the data into fewer files."
        )
    wanted = min(_FACTOR * files, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Descriptors:
    """The files at ``paths``, by number. For one thread at a time.

    ``fds``: the descriptor of each, or ``NOT_OPEN``; ``maps``: the address of its mapping, or 0. ``errors``: why a file
    could not be opened. Reads from such a file fail when they are due: those before them are still good.
    """

    def __init__(self, paths: Sequence[Path], *, direct: bool, mapped_bytes: Sequence[int] | None = None) -> None:
        """``mapped_bytes``: how much of each file to map; shorter files are not mapped."""
        allow_open(len(paths))
        self._paths, self._direct = paths, direct
        self._sizes = mapped_bytes if len(paths) <= _MOST_MAPS else None
        self.fds: Rows = np.full(len(paths), NOT_OPEN, dtype=np.int64)
        self.maps: Rows = np.zeros(len(paths), dtype=np.int64)
        self.errors: dict[int, OSError] = {}
        self._end = weakref.finalize(self, _close, range(len(paths)), self.fds, self.maps, self._sizes)

    def open(self, files: Rows) -> None:
        """Open those of ``files``, which may repeat, that are not open yet."""
        missing = files[self.fds[files] == NOT_OPEN]
        for file in set(missing.tolist()):
            try:
                self._open(file)
                self.errors.pop(file, None)
            except OSError as error:
                self.errors[file] = error
                _close([file], self.fds, self.maps, self._sizes)

    def close(self) -> None:
        """Close all; nothing may still read from them. Idempotent; ``open`` opens them again."""
        _close(range(len(self._paths)), self.fds, self.maps, self._sizes)

    def _open(self, file: int) -> None:
        path = self._paths[file]
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # NONBLOCK: a pipe would wait for its writer
        self.fds[file] = fd  # before a call that may fail, so that it is closed then
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EISDIR, f"{path} is not a regular file")
        if self._direct:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        if self._sizes is not None and self._sizes[file] <= status.st_size:
            self.maps[file] = map_file(fd, self._sizes[file])


def _close(files: Sequence[int], fds: Rows, maps: Rows, sizes: Sequence[int] | None) -> None:
    for file in files:
        fd, address = int(fds[file]), int(maps[file])
        fds[file], maps[file] = NOT_OPEN, 0
        if address and sizes is not None:
            unmap_file(address, sizes[file])
        if fd != NOT_OPEN:
            with contextlib.suppress(OSError):
                os.close(fd)
