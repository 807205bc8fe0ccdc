"""Flags: 32-bit words in page-locked memory by which GPU and CPU signal each other without the host in between.

A flag only counts up, and is compared cyclically: it has *reached* a value when ``(int32)(word - value) >= 0``, the
rule that the CUDA driver's wait follows, so that a counter may wrap after 2^32 steps. One writer per flag: either a
lane (`Lane.write_flag`) or the CPU worker.

A GPU that waits for a flag waits for ever. Whatever ends a writer must therefore call `Flags.abort`: it lets every wait
pass, and makes every later use raise, because what lies behind the flag was never computed.
"""

from __future__ import annotations

import ctypes
import threading
import time

import torch

from ..core.errors import LaneError
from ..core.tags import Tag
from ..native import flag_words
from .cuda_driver import Driver, DriverError, driver
from .host import HostArena
from .ledger import Ledger
from .page_lock import PageLock

_SPACING = 64  # a cache line each, so that a polling core does not slow the writer of the neighbour


def reached(word: int, value: int) -> bool:
    """The cyclic comparison, on numbers."""
    return (word - value) & 0xFFFFFFFF < 1 << 31


class Flag:
    """One word. Made by `Flags`, which must outlive it."""

    def __init__(self, board: Flags, address: int, device_address: int | None) -> None:
        self.board = board
        self.address = address
        self.device_address = device_address  # None where no GPU can reach it
        self.awaited = 0  # the latest value that somebody waits for; what abort writes

    def read(self) -> int:
        return flag_words.load(self.address)

    def set(self, value: int) -> None:
        """Store ``value``; everything this thread wrote before is visible to whoever sees it."""
        self.board.raise_if_aborted()
        flag_words.store(self.address, value)

    def expect(self, value: int) -> None:
        """Note that somebody is about to wait for ``value``; call before the wait is enqueued."""
        with self.board.lock:
            self.board.raise_if_aborted()
            if reached(value, self.awaited):
                self.awaited = value

    def wait(self, value: int, timeout_s: float | None = None) -> bool:
        """Block until the flag has reached ``value``; False if ``timeout_s`` passed first. Ctrl-C gets through."""
        self.expect(value)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = 0.1 if deadline is None else min(0.1, deadline - time.monotonic())
            arrived = flag_words.wait(self.address, value, max(0.0, left))
            self.board.raise_if_aborted()
            if arrived:
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False


class Flags:
    """A board of flags, all zero at first. ``on_stream`` tells whether CUDA streams can write and await them."""

    def __init__(self, count: int, *, ledger: Ledger, device: torch.device, page_lock: PageLock | None = None) -> None:
        self.lock = threading.RLock()
        self._error: BaseException | None = None
        self._arena = HostArena(max(1, count) * _SPACING, ledger=ledger, tag=Tag.STAGING, page_lock=page_lock)
        self._words = self._arena.allocate(max(1, count) * _SPACING, alignment=_SPACING)
        start = self._words.tensor().data_ptr()
        cuda = driver() if device.type == "cuda" and self._arena.pinned else None
        offset = _stream_offset(cuda, start, device)
        self.on_stream = offset is not None
        addresses = range(start, start + count * _SPACING, _SPACING)
        self._flags = [Flag(self, address, None if offset is None else address + offset) for address in addresses]

    def __getitem__(self, index: int) -> Flag:
        return self._flags[index]

    def __len__(self) -> int:
        return len(self._flags)

    def abort(self, error: BaseException) -> None:
        """Let every wait on this board pass and make every later use raise LaneError from ``error``.

        The first error stays.
        """
        with self.lock:
            self._error = self._error or error
            for flag in self._flags:
                if not reached(flag.read(), flag.awaited):
                    flag_words.store(flag.address, flag.awaited)

    def raise_if_aborted(self) -> None:
        if self._error is not None:
            raise LaneError(f"A writer of this flag ended early: {self._error}") from self._error

    def close(self) -> None:
        """Release every wait and return the memory. The lanes that used the flags must be empty."""
        self.abort(LaneError("the flags were closed"))
        self._arena.close()


def _stream_offset(cuda: Driver | None, start: int, device: torch.device) -> int | None:
    """Device address minus host address of the words, or None if streams of ``device`` cannot write and await them."""
    if cuda is None:
        return None
    try:
        with torch.cuda.device(device):
            address = cuda.device_address(start)
            stream = torch.cuda.Stream(device)
            cuda.write_value(stream.cuda_stream, address, 1)
            cuda.wait_value(stream.cuda_stream, address, 1)
            stream.synchronize()
    except DriverError:
        return None
    worked = ctypes.c_uint32.from_address(start).value == 1
    flag_words.store(start, 0)
    return address - start if worked else None
