"""Open files of a dataset that may have more files than a process may open: closes the least recently used."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import stat
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import SettingError
from ...native.rows.c_rows import map_file, unmap_file

_MAX_OPEN = 4096


class CannotOpen(Exception):
    """File number ``file`` cannot be opened, for the kernel's reason. A caller that knows the row reports it."""

    def __init__(self, file: int, cause: OSError) -> None:
        super().__init__(file, cause)
        self.file, self.cause = file, cause


def open_limit() -> int:
    """The most files to keep open: half of the process's limit, to leave room for user code."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN if soft == resource.RLIM_INFINITY else max(8, min(_MAX_OPEN, soft // 2))


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A descriptor, and the address of a mapping of the file's first ``mapped_bytes``; 0: none."""

    fd: int
    map: int = 0
    mapped_bytes: int = 0

    def close(self) -> None:
        if self.map:
            unmap_file(self.map, self.mapped_bytes)
        with contextlib.suppress(OSError):
            os.close(self.fd)


class Descriptors:
    """The files at ``paths``, by number, opened when first lent. For one thread at a time."""

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        direct: bool,
        limit: int | None = None,
        mapped_bytes: Sequence[int] | None = None,
    ) -> None:
        """``mapped_bytes``: how much of each file to map; shorter files are not mapped."""
        self.limit = limit or open_limit()
        self._paths, self._direct, self._mapped_bytes = paths, direct, mapped_bytes
        self._open: OrderedDict[int, OpenFile] = OrderedDict()  # by number, least recently used first
        self._users: dict[int, int] = {}
        self._end = weakref.finalize(self, _close_all, self._open)

    def lend(self, files: Sequence[int]) -> list[OpenFile] | None:
        """The open ``files``, which remain open until ``give_back``; None if too many others are lent.

        Raises CannotOpen.
        """
        if len(files) > self.limit:
            raise self.too_many(len(files))
        for file in files:
            self._users[file] = self._users.get(file, 0) + 1
        try:
            lent = [self._opened(file) for file in files]
        except BaseException:
            self.give_back(files)
            raise
        found = [file for file in lent if file is not None]
        if len(found) < len(files):
            self.give_back(files)
            return None
        return found

    def too_many(self, count: int) -> SettingError:
        """The error for a read that needs more files than the limit."""
        return SettingError(
            f"Cannot read from {count} files at once: {self.limit} may be open. The limit is half of ulimit -n, at "
            f"most {_MAX_OPEN}. Raise it, or `storm data pack` the data into fewer files."
        )

    def give_back(self, files: Sequence[int]) -> None:
        for file in files:
            left = self._users.get(file, 0) - 1
            if left > 0:
                self._users[file] = left
            else:
                self._users.pop(file, None)

    def give_back_all(self) -> None:
        """Give back all files: nothing reads any more."""
        self._users.clear()

    def close(self) -> None:
        """Close all; nothing may still read from them. Idempotent; ``lend`` opens them again."""
        self._users.clear()
        _close_all(self._open)

    def _opened(self, file: int) -> OpenFile | None:
        opened = self._open.get(file)
        if opened is not None:
            self._open.move_to_end(file)
            return opened
        while len(self._open) >= self.limit:
            idle = next((old for old in self._open if old not in self._users), None)
            if idle is None:
                return None
            self._open.pop(idle).close()
        path = self._paths[file]
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # NONBLOCK: a pipe would wait for its writer
        except OSError as error:
            raise CannotOpen(file, error) from error
        self._open[file] = OpenFile(fd)  # before a call that may fail, so that ``close`` finds it
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CannotOpen(file, OSError(errno.EISDIR, f"{path} is not a regular file"))
        if self._direct:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        if self._mapped_bytes is not None and self._mapped_bytes[file] <= status.st_size:
            size = self._mapped_bytes[file]
            self._open[file] = OpenFile(fd, map_file(fd, size), size)
        return self._open[file]


def _close_all(opened: OrderedDict[int, OpenFile]) -> None:
    while opened:
        opened.popitem()[1].close()
