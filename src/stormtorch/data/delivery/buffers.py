"""Host memory that becomes the user's batches if the device is the CPU.

The reader writes a batch straight into the memory that the user gets: one buffer for each field, for one batch or a
group of them. The user may keep it forever. When the last tensor over it is gone, the buffer is filled again: fresh
memory would cost a page fault for every 4 KiB, as much as the copy itself. malloc does the same for small buffers.

Reference counts tell whether a buffer is in use: every tensor has its own storage over the buffer's pages, and each
storage holds the one object that represents them. ``pools/alias.py`` gets a call when a storage goes; polling costs a
fifth of that, and here the moment to poll is always the same.

Buffers that the user holds are the user's memory. The delivery charges the others to the ledger.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections import deque
from contextlib import suppress

import numpy as np
import torch

from ...core.sizes import MiB, round_up
from ..source import Field

_LARGE = 1 * MiB  # from this size on, a buffer has its own mapping
LINE = 64  # of the CPU's caches; torch aligns its own memory to it too

Pages = ctypes.Array[ctypes.c_ubyte]


def _reference_count(pages: deque[Pages]) -> int:
    """The reference count of the first pages. They get no local name: debuggers copy locals."""
    return sys.getrefcount(pages[0])


# Measured: versions of Python count the references of an argument differently.
_UNUSED = _reference_count(deque([(ctypes.c_ubyte * 1)()]))


class Buffers:
    """Buffers for groups of ``batches`` batches of ``rows`` rows, of one field.

    For one thread at a time; any thread may drop tensors. A batch that the user keeps holds its whole group's memory.
    """

    def __init__(self, field: Field, rows: int, batches: int = 1) -> None:
        self.most = 0  # buffers to remember; older ones belong to the user alone
        self._field, self._size = field, batches * rows * field.row_bytes
        self._all: deque[Pages] = deque()  # least recently given first

    def take(self) -> Pages:
        """The pages of a group, content undefined; used again when no object refers to them."""
        for _ in range(len(self._all)):
            is_unused = _reference_count(self._all) == _UNUSED
            self._all.rotate(-1)
            if is_unused:
                return self._all[-1]
        return self._new()

    def tensor(self, pages: Pages, first: int, rows: int) -> torch.Tensor:
        """Some of the rows in ``pages``, as a tensor with its own storage."""
        field = self._field
        count, offset = rows * field.row_bytes // field.dtype.itemsize, first * field.row_bytes
        # resize_ moves nothing here. A view would refuse detach_ and similar calls of user code.
        return torch.frombuffer(pages, dtype=field.dtype, count=count, offset=offset).resize_(rows, *field.shape)

    def clear(self) -> None:
        """Forget all buffers: unused ones are freed, the others belong to the user."""
        self._all.clear()

    def _new(self) -> Pages:
        kind = ctypes.c_ubyte * self._size
        if self._size < _LARGE:
            memory = np.empty(self._size + LINE, dtype=np.uint8)
            pages = kind.from_address(round_up(memory.ctypes.data, LINE))
            pages.memory = memory  # type: ignore[attr-defined]
        else:  # malloc would not return it to the system
            mapped = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without huge pages
                mapped.madvise(mmap.MADV_HUGEPAGE)
            pages = kind.from_buffer(mapped)
        self._all.append(pages)
        while len(self._all) > self.most:
            self._all.popleft()
        return pages
