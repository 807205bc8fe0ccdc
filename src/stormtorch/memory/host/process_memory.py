"""This process's other RAM: returns freed memory to the system, and recognises mapped files, which are page cache."""

from __future__ import annotations

import bisect
import ctypes
from pathlib import Path

import torch

from ...core.sizes import MiB

_libc = ctypes.CDLL(None)
_NOT_FILES = ("/dev/shm/", "/memfd:", "/dev/zero", "/SYSV")  # named, but RAM all the same
_LAST = 1 << 64


def trim_heap() -> None:
    """Return freed memory to the system: malloc keeps pieces up to 32 MiB. On ARM torch has its own allocator, which
    returns memory a moment after it was freed, when it is called again."""
    if hasattr(_libc, "malloc_trim"):  # only glibc has it
        _libc.malloc_trim(0)
    torch.empty(MiB, dtype=torch.uint8, device="cpu")


class MappedFiles:
    """The present mappings of files."""

    def __init__(self, table: str | None = None) -> None:
        """``table``: in the format of /proc/self/maps, for tests."""
        self._spans: list[tuple[int, int]] = []
        for line in (Path("/proc/self/maps").read_text() if table is None else table).splitlines():
            span, _, _, _, inode, *path = line.split(maxsplit=5)
            if inode != "0" and not (path and path[0].startswith(_NOT_FILES)):
                first, last = span.split("-")
                self._spans.append((int(first, 16), int(last, 16)))

    def __contains__(self, address: int) -> bool:
        at = bisect.bisect(self._spans, (address, _LAST)) - 1  # the system lists them in order
        return at >= 0 and address < self._spans[at][1]
