"""First touch of fresh memory: one thread's page faults take seconds per ten GiB, those of many run in parallel."""

from __future__ import annotations

import ctypes

import numpy as np

from .cores import usable_count
from .library import library

_PAGE = 4096


def can_touch_beside_writers() -> bool:
    """Whether other threads may write to the range while it is touched."""
    return library() is not None


def first_touch(address: int, size_bytes: int) -> None:
    """Make the pages of a range exist by writing to each its own content. Blocks, without the GIL, on all cores."""
    native = library()
    if native is None:
        pages = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
        pages[::_PAGE] |= 0
        pages[-1:] |= 0
        return
    status = native.c.storm_touch(address, size_bytes, usable_count())
    assert status == 0, f"storm_touch failed: {status}"
