"""The calls that move bytes between files and memory, in Python and as C functions. Tests replace them."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any, TypeAlias

Move: TypeAlias = Callable[[int, memoryview, int], int]  # descriptor, memory, offset; returns a count, as preadv does
STALLS = 8  # calls that get no further, before an access is given up; as in csrc
_CALL = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, use_errno=True
)


def read_at(fd: int, view: memoryview, offset: int) -> int:
    """Read at most as many bytes as ``view`` has; returns how many."""
    return os.preadv(fd, [view], offset)


def write_at(fd: int, view: memoryview, offset: int) -> int:
    """Write at most as many bytes as ``view`` has; returns how many."""
    return os.pwritev(fd, [view], offset)


def in_c(move: Move) -> Any:
    """``move`` as a C function with the interface of pread and pwrite. Keep it as long as C may call it."""

    def call(fd: int, address: int, size: int, offset: int) -> int:
        try:
            return move(fd, memory_at(address, size), offset)
        except BaseException as error:  # C must not take what a failed call returns for a count
            ctypes.set_errno(getattr(error, "errno", None) or errno.EIO)
            return -1

    return _CALL(call)


def memory_at(address: int, size: int) -> memoryview:
    """The bytes at an address, which must exist as long as the view is used."""
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def move_all(move: Move, fd: int, view: memoryview, offset: int, *, needed: int, unit: int) -> tuple[int, int]:
    """Move ``needed`` bytes of ``view``; goes on after short counts, at multiples of ``unit``. Returns an errno, 0 for
    success and ENODATA where no call moves more, and the number of bytes."""
    got = stalls = 0
    while got < needed:
        at = got - got % unit
        try:
            more = move(fd, view[at:], offset + at)
        except OSError as error:
            return error.errno or errno.EIO, got
        got, stalls = max(got, at + more), 0 if at + more > got else stalls + 1
        if not more or stalls == STALLS:
            return errno.ENODATA, got
    return 0, got
