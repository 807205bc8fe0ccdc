"""One mapping of RAM, of which an arena has several: private in huge pages, shared by name, or another process's."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import torch

from ...core.errors import OutOfBudget, SettingError
from ...core.sizes import MiB, format_bytes, round_down

_HUGE_PAGE = 2 * MiB


class Region:
    """One mapping. ``bytes``, and every view made from it, keeps it alive."""

    __slots__ = ("bytes", "descriptor", "index", "pages", "size", "used_bytes")

    def __init__(self, index: int, mapping: mmap.mmap, start: int, size: int, descriptor: int | None = None) -> None:
        self.index, self.size, self.descriptor = index, size, descriptor
        self.used_bytes = 0  # from its start on
        # Through a ctypes array, not from the mmap itself: its finalizer runs before the mapping ends, an mmap's after.
        self.pages = (ctypes.c_ubyte * size).from_buffer(mapping, start)
        with torch.inference_mode(False):  # else a caller in that mode would get memory that lanes may not write
            self.bytes = torch.frombuffer(self.pages, dtype=torch.uint8)

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()


def map_private(index: int, size: int, *, fork: bool) -> Region:
    """Anonymous memory aligned to huge pages. The slack for the alignment is never touched, so it costs addresses
    only."""
    try:
        mapping = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OutOfBudget(
            f"Cannot map {format_bytes(size)} of RAM",
            f"the system refused: {error.strerror}",
            "The limit is the system's, not ram=.",
            "Raise ulimit -v, or vm.overcommit_memory, or lower ram.",
        ) from error
    start = -ctypes.addressof(ctypes.c_ubyte.from_buffer(mapping)) % _HUGE_PAGE
    whole = round_down(size, _HUGE_PAGE)  # the tail remains in small pages: a huge one would exceed the charge
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without transparent huge pages refuses: small ones work as well, but are slower to lock.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE, start, whole)
    if not fork:
        # A fork copies page-locked memory at once, all of it, for each worker of a data loader. The child gets none.
        mapping.madvise(mmap.MADV_DONTFORK)
    return Region(index, mapping, start, size)


def map_shared(index: int, size: int) -> Region:
    """Memory in an anonymous file: no name, no use of /dev/shm, gone with its last user."""
    descriptor = os.memfd_create("stormtorch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        return Region(index, mmap.mmap(descriptor, size), 0, size, descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def attach_region(index: int, pid: int, descriptor: int, size: int) -> Region:
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SettingError(
            f"Cannot attach the shared arena of process {pid}: {error.strerror}. It must run, with the arena open."
        ) from error
    try:
        region = Region(index, mmap.mmap(opened, size), 0, size, opened)
    except BaseException:
        os.close(opened)
        raise
    region.used_bytes = size  # only the owner knows what is free
    return region
