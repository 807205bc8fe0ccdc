"""Loads, stores and waits on 32-bit words that other threads, or a GPU, read and write.

A word *has reached* a value when ``(int32)(word - value) >= 0``, and it only moves forward: a store of a value that it
has reached already does nothing, so that writers out of order cannot undo a value that a reader waits for.

With the library: acquire and release order, and a wait that sleeps outside the GIL. Without it every reader and writer
on the CPU is a Python thread, which the GIL orders; only a store needs a lock, being a load and a store.
"""

from __future__ import annotations

import ctypes
import threading
import time

from .library import FlagWord, library

_POLL_S = 20e-6
_storing = threading.RLock()  # for the fallback; re-entrant, because the finalizer of a collected board stores too


def has_reached(word: int, value: int) -> bool:
    """The cyclic comparison, on numbers."""
    return (word - value) & 0xFFFFFFFF < 1 << 31


def load(address: int) -> int:
    """Read the word at ``address``; the reader then also sees everything that its writer wrote before."""
    native = library()
    if native is not None:
        return int(native.c.storm_load_flag(address))
    return ctypes.c_uint32.from_address(address).value


def store(address: int, value: int) -> None:
    """Write ``value``, unless the word has reached it; its readers also see everything this thread wrote before."""
    native = library()
    if native is not None:
        native.c.storm_set_flag(FlagWord(address, value & 0xFFFFFFFF))
        return
    with _storing:
        word = ctypes.c_uint32.from_address(address)
        if not has_reached(word.value, value):
            word.value = value & 0xFFFFFFFF


def wait(address: int, value: int, timeout_s: float) -> bool:
    """Block until the word has reached ``value``; False if ``timeout_s`` passed first."""
    native = library()
    if native is not None:
        return bool(native.c.storm_wait_flag(FlagWord(address, value & 0xFFFFFFFF), timeout_s))
    deadline = time.monotonic() + timeout_s
    while not has_reached(load(address), value):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
