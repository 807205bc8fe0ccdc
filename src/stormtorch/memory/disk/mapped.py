"""Files that a model's weights are mapped from: which bytes of which file a tensor shows, and whether they changed.

safetensors, and with it ``from_pretrained`` of transformers, gives tensors that are views of a private mapping of their
file. The system reads such memory when it is used, and takes it back by itself. A write to it makes private pages,
which the file does not have; the kernel's page table tells them apart. A file that is written, truncated or replaced
while it is in use would give wrong numbers: a fingerprint detects that."""

from __future__ import annotations

import bisect
import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...core.endings import Closing
from ...core.errors import StorageError
from ...core.sizes import MiB, round_down, round_up
from ...native import moves
from .calls import storage_error
from .files import ALIGNMENT, File, open_file

PAGE = os.sysconf("SC_PAGE_SIZE")
_NOT_FILES = ("/dev/", "/memfd:", "/SYSV", "/proc/", "/sys/", "[")
_DELETED = " (deleted)"
_HEAD_BYTES = 64 * 1024  # of a file, compared at every save: the header of safetensors, or its first part
_PRESENT, _SWAPPED, _OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))  # of an entry of the page table
_PART = 8 * MiB  # read at once


class Span(NamedTuple):
    """Bytes of a file."""

    path: str
    inode: int
    offset: int
    size: int


class _Mapping(NamedTuple):
    start: int
    end: int
    offset: int
    inode: int
    path: str


class Mappings:
    """The present private mappings of files that have a name."""

    def __init__(self, table: str | None = None) -> None:
        """``table``: in the format of /proc/self/maps, for tests."""
        self._found: list[_Mapping] = []
        for line in (Path("/proc/self/maps").read_text() if table is None else table).splitlines():
            span, access, offset, _, inode, *named = line.split(maxsplit=5)
            path = named[0] if named else ""
            if access[3] != "p" or not path.startswith("/") or path.startswith(_NOT_FILES) or path.endswith(_DELETED):
                continue
            first, last = span.split("-")
            self._found.append(_Mapping(int(first, 16), int(last, 16), int(offset, 16), int(inode), path))

    def span(self, address: int, size: int) -> Span | None:
        """The bytes of a file that are mapped at ``address``; None if there is no file, or more than one mapping."""
        at = bisect.bisect(self._found, address, key=lambda mapping: mapping.start) - 1  # in order of their addresses
        if at < 0 or address + size > (found := self._found[at]).end:
            return None
        return Span(found.path, found.inode, address - found.start + found.offset, size)


@dataclass(frozen=True)
class _Fingerprint:
    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> _Fingerprint:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class WeightFile(Closing):
    """A file of weights, open for reading as long as a session reads from it. Nothing writes to it."""

    def __init__(self, span: Span) -> None:
        """Raises StorageError if the path does not lead to the mapped file any more."""
        self.path, self.name = Path(span.path), Path(span.path).name
        self.direct: File = open_file(self.path)
        try:
            # Direct reads cannot end where most files do, within a block.
            self.plain: File = open_file(self.path, direct=False)
        except BaseException:
            self.direct.close()
            raise
        status = os.fstat(self.direct.number)
        self.size, self._print = status.st_size, _Fingerprint.of(status)
        self._head = os.pread(self.plain.number, min(_HEAD_BYTES, self.size), 0)
        if status.st_ino != span.inode or os.fstat(self.plain.number).st_ino != span.inode:
            self.close()
            raise StorageError(f"{self.path} is not the file any more that the model's weights were mapped from.")

    def close(self) -> None:
        """End reading."""
        self.direct.close()
        self.plain.close()

    @property
    def whole_bytes(self) -> int:
        """The part from the start that direct reads can read."""
        return round_down(self.size, ALIGNMENT) if self.direct.mode == "direct" else self.size

    def check(self, *, content: bool = False) -> None:
        """Raise if the file was written, truncated, removed or replaced since it was opened. ``content``: compare its
        first bytes too."""
        found = _Fingerprint.of(os.fstat(self.direct.number))
        if found != self._print or (content and self._read_head() != self._head):
            change = f"has {found.size} bytes in place of {self.size}" if found.size != self.size else "was written"
            raise self._changed(change)
        try:
            there = self.path.stat()
        except OSError as error:
            raise self._changed(f"cannot be found ({error.strerror})") from error
        if (there.st_dev, there.st_ino) != (found.device, found.inode):
            raise self._changed("was replaced by another")

    def _read_head(self) -> bytes:
        try:
            return os.pread(self.plain.number, len(self._head), 0)
        except OSError as error:
            raise storage_error(f"read {self.path}", error) from error

    def _changed(self, change: str) -> StorageError:
        return StorageError(
            f"Cannot go on: {self.path}, from which frozen weights are read, {change} while it was in use. Leave the "
            "model's files alone during a run; start again from the last checkpoint."
        )

    def fill(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with the bytes from ``offset`` on, which do not stay in the page cache. Blocks."""
        number = self.plain.number
        error, got = moves.move_all(moves.read_at, number, view, offset, needed=len(view), unit=1)
        if error == errno.ENODATA:
            raise self._changed(f"is truncated at byte {offset + got}")
        if error:
            raise storage_error(f"read {len(view)} bytes of {self.path}", OSError(error, os.strerror(error)))
        os.posix_fadvise(number, offset, len(view), os.POSIX_FADV_DONTNEED)

    def is_shown(self, address: int, offset: int, size: int) -> bool:
        """Whether the mapping at ``address`` still shows the file's bytes: no code has written to it."""
        for at, count in private_pages(address, size):
            first, last = max(at, address), min(at + count, address + size)
            here = ctypes.string_at(first, last - first)
            if here != os.pread(self.plain.number, last - first, offset + first - address):
                return False
        return True


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A contiguous tensor in a file that nothing writes."""

    file: WeightFile
    at: int
    nbytes: int

    def read(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with its bytes from ``offset`` on. Raises StorageError."""
        self.file.fill(view, self.at + offset)


def private_pages(address: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges of pages around these bytes that are not the file's: code has written to them. Raises OSError where the
    system does not tell."""
    first, last = round_down(address, PAGE) // PAGE, round_up(address + size, PAGE) // PAGE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as table:
        for at in range(first, last, _PART // 8):
            count = min(_PART // 8, last - at)
            found = os.pread(table.fileno(), 8 * count, 8 * at)
            if len(found) != 8 * count:
                raise OSError("the page table is not readable")
            entries = np.frombuffer(found, dtype=np.uint64)
            there = (entries & (_PRESENT | _SWAPPED)) != 0
            for page in np.flatnonzero(there & ((entries & _OF_FILE) == 0)).tolist():
                yield (at + page) * PAGE, PAGE


def is_there(span: Span) -> bool:
    """Whether the path still names the file that is mapped. On some file systems (overlayfs before Linux 6.8) no
    mapping tells which file it shows."""
    try:
        status = Path(span.path).stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_ino == span.inode
