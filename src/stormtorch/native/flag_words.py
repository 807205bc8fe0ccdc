"""Loads, stores and waits on 32-bit words that other threads, or a GPU, read and write.

With the library: acquire and release order, and a wait that sleeps outside the GIL. Without it every reader and writer
on the CPU is a Python thread, which the GIL orders.
"""

from __future__ import annotations

import ctypes
import time

from .library import FlagWord, library

_POLL_S = 20e-6


def load(address: int) -> int:
    """The word at ``address``."""
    return ctypes.c_uint32.from_address(address).value


def store(address: int, value: int) -> None:
    """Write ``value``; whoever sees it also sees everything that this thread wrote before."""
    native = library()
    if native is not None:
        native.c.storm_set_flag(FlagWord(address, value & 0xFFFFFFFF))
    else:
        ctypes.c_uint32.from_address(address).value = value & 0xFFFFFFFF


def wait(address: int, value: int, timeout_s: float) -> bool:
    """Block until the word has reached ``value`` in the cyclic sense; False if ``timeout_s`` passed first."""
    native = library()
    if native is not None:
        return bool(native.c.storm_wait_flag(FlagWord(address, value & 0xFFFFFFFF), timeout_s))
    deadline = time.monotonic() + timeout_s
    while (load(address) - value) & 0xFFFFFFFF >= 1 << 31:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
