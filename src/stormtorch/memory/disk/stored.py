"""A range of a scratch file as tensors: mapped, for code that wants tensors, or read and written in pieces.

A mapping takes RAM only for pages that were touched, and the system may take these back. `sync` and `drop` give
them back at once. Direct I/O goes past the mapping, so its caller drops what the mapping has before it is used again.

A page of a mapping that the disk cannot read ends the process with SIGBUS. Code that moves whole tensors, such as a
checkpoint, therefore uses a `StoredTensor`, whose calls raise."""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass

import torch

from ...core.sizes import round_down, round_up
from ...native import moves
from .calls import storage_errors, write_out
from .files import ALIGNMENT
from .scratch import ScratchFile


class MappedFile:
    """A scratch file, mapped as a whole: a mapping and a descriptor for each tensor would be too many."""

    def __init__(self, file: ScratchFile) -> None:
        self.name, self.calls, self.number, self.map = file.name, file.calls, -1, mmap.mmap(-1, ALIGNMENT)
        self._finalizer: weakref.finalize[..., MappedFile] | None = None
        if file.size_bytes:
            with storage_errors(f"map {file.name}"):
                # Without O_DIRECT: what is read and written here begins and ends anywhere.
                self.number = os.open(f"/proc/self/fd/{file.number}", os.O_RDWR | os.O_CLOEXEC)
                self._finalizer = weakref.finalize(self, os.close, self.number)
                self.map = mmap.mmap(self.number, file.size_bytes)

    def close(self) -> None:
        """Close the descriptor. Tensors of the mapping remain valid."""
        self.number = -1
        if self._finalizer is not None:
            self._finalizer()


class MappedRange:
    """``size`` bytes of a scratch file from ``offset`` on, both multiples of a page."""

    def __init__(self, file: MappedFile, offset: int, size: int) -> None:
        self.offset, self.size, self.name, self.file = offset, size, file.name, file
        self.bytes = torch.empty(0, dtype=torch.uint8)
        if size:
            self.bytes = torch.frombuffer(file.map, dtype=torch.uint8, count=size, offset=offset)

    def sync(self, start: int, stop: int) -> None:
        """Write what was written to these bytes of the mapping to the disk, and release their RAM."""
        first, last = self._pages(start, stop)
        if last > first:
            self.file.map.madvise(mmap.MADV_DONTNEED, self.offset + first, last - first)  # the system now knows all
            if self.file.number >= 0:
                with storage_errors(f"write {last - first} bytes of {self.name}"):
                    write_out(self.file.number, self.offset + first, last - first, wait=True)
                self.drop(start, stop)

    def drop(self, start: int, stop: int) -> None:
        """Release the RAM of these bytes; they are read again when they are used."""
        first, last = self._pages(start, stop)
        if last > first:
            self.file.map.madvise(mmap.MADV_DONTNEED, self.offset + first, last - first)
            if self.file.number >= 0:
                os.posix_fadvise(self.file.number, self.offset + first, last - first, os.POSIX_FADV_DONTNEED)

    def _pages(self, start: int, stop: int) -> tuple[int, int]:
        return round_down(start, mmap.PAGESIZE), min(round_up(stop, mmap.PAGESIZE), self.size)

    def move(self, view: memoryview, at: int, *, write: bool) -> None:
        """Fill ``view`` with the bytes from ``at`` on, or write them there. Leaves nothing in the page cache."""
        verb, call = ("write", self.file.calls.pwrite) if write else ("read", self.file.calls.pread)
        error, got = moves.move_all(call, self.file.number, view, self.offset + at, needed=len(view), unit=1)
        with storage_errors(f"{verb} {len(view)} bytes of {self.name}", numbers=f"{got} bytes done"):
            if error:
                raise OSError(error, os.strerror(error))
            if write:  # the cache gives up clean pages only
                write_out(self.file.number, self.offset + at, len(view), wait=True)
        self.drop(at, at + len(view))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A contiguous tensor in a range, without its memory."""

    where: MappedRange
    at: int
    nbytes: int

    @property
    def bytes(self) -> torch.Tensor:
        """The same bytes in the mapping."""
        return self.where.bytes[self.at : self.at + self.nbytes]

    def sync(self) -> None:
        """Write what was written to the mapping to the disk, and release its RAM. Raises StorageError."""
        self.where.sync(self.at, self.at + self.nbytes)

    def read(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with its bytes from ``offset`` on. Raises StorageError."""
        self.where.move(view, self.at + offset, write=False)

    def write(self, view: memoryview, offset: int) -> None:
        """Write ``view`` to its bytes from ``offset`` on. Raises StorageError."""
        self.where.move(view, self.at + offset, write=True)
