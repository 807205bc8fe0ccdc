"""Host memory that becomes the user's batches, where the device is the CPU.

The bytes of a batch are read straight into the memory that the user gets, one buffer for each field, of one batch or of
a group of them. The user may keep it for ever. When the last tensor over it is gone, the buffer is filled again: fresh
memory would cost a page fault for every 4 KiB, which is as much as the copy itself. Small buffers are left to malloc,
which does the same.

Whether anybody still uses a buffer is what reference counting knows: every tensor gets a storage of its own over the
buffer's pages, and each such storage holds the one object that stands for them. ``pools/alias.py`` is told when a
storage goes; this asks, which costs a fifth, and here the moment to ask is always the same.

Buffers that the user holds are the user's memory; those that are being filled, or wait, are charged to the ledger by
whoever decides how many there are.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from ...core.sizes import KiB, MiB, round_up
from ..source import Field

_SMALL = 64 * KiB
_LARGE = 1 * MiB  # from here on it is mapped by itself
LINE = 64  # of the CPU's caches; torch aligns its own memory to it too

Pages = ctypes.Array[ctypes.c_ubyte]


def _holders(pages: deque[Pages]) -> int:
    """What reference counting tells of the pages in front. They get no name here: debuggers copy names."""
    return sys.getrefcount(pages[0])


# Measured, not known: versions of Python differ in what they count of an argument.
_UNUSED = _holders(deque([(ctypes.c_ubyte * 1)()]))


@dataclass(slots=True)
class Room:
    """Memory for rows of one field: all of it, and the pages that it lies in, unless it is malloc's."""

    whole: torch.Tensor
    pages: Pages | None


class Buffers:
    """Buffers for groups of ``batches`` batches of ``rows`` rows, of one field.

    For one thread at a time; tensors may be dropped on any. A batch that the user keeps holds its whole group's.
    """

    def __init__(self, field: Field, rows: int, batches: int = 1) -> None:
        self.most = 0  # buffers that are remembered; those beyond are the user's alone
        self._field, self._rows, self._batches = field, rows, batches
        self._size = batches * rows * field.row_bytes
        self._all: deque[Pages] = deque()  # the one that was given longest ago in front

    def take(self, rows: int) -> Room:
        """Memory for ``rows`` rows, content undefined."""
        field = self._field
        if self._batches == 1 and (rows != self._rows or self._size < _SMALL):
            return Room(torch.empty((rows, *field.shape), dtype=field.dtype, device="cpu"), None)
        pages = self._unused() or self._new()
        return Room(self._over(pages, 0, rows), pages)

    def batches(self, room: Room) -> list[torch.Tensor]:
        """The batches that lie there, each with a storage of its own."""
        if room.pages is None or self._batches == 1:
            return [room.whole]
        rows = len(room.whole)
        return [self._over(room.pages, at, min(self._rows, rows - at)) for at in range(0, rows, self._rows)]

    def clear(self) -> None:
        """Let go of all that nobody uses; the rest is its users'."""
        self._all.clear()

    def _over(self, pages: Pages, first: int, rows: int) -> torch.Tensor:
        field = self._field
        count, offset = rows * field.row_bytes // field.dtype.itemsize, first * field.row_bytes
        # resize_, which moves nothing here: of a view, users could not ask detach_ and the like.
        return torch.frombuffer(pages, dtype=field.dtype, count=count, offset=offset).resize_(rows, *field.shape)

    def _unused(self) -> Pages | None:
        for _ in range(len(self._all)):
            is_unused = _holders(self._all) == _UNUSED
            self._all.rotate(-1)
            if is_unused:
                return self._all[-1]
        return None

    def _new(self) -> Pages:
        kind = ctypes.c_ubyte * self._size
        if self._size < _LARGE:
            memory = np.empty(self._size + LINE, dtype=np.uint8)
            pages = kind.from_address(round_up(memory.ctypes.data, LINE))
            pages.memory = memory  # type: ignore[attr-defined]
        else:  # malloc would keep it for itself when it is given back
            mapped = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without huge pages
                mapped.madvise(mmap.MADV_HUGEPAGE)
            pages = kind.from_buffer(mapped)
        self._all.append(pages)
        while len(self._all) > self.most:
            self._all.popleft()
        return pages
