"""How much memory this process holds, for tests of what is left behind."""

from __future__ import annotations

import ctypes
import gc

import psutil


def resident_bytes() -> int:
    """What is free within malloc is not counted: that is no leak, and comes and goes by tens of MiB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)
