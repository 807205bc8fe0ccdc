"""Flags: 32-bit words in page-locked memory by which GPU and CPU signal each other without the host in between.

A flag only counts up, and is compared cyclically: it has *reached* a value when ``(int32)(word - value) >= 0``, the
rule that the CUDA driver's wait follows, so that a counter may wrap after 2^32 steps. One writer per flag: either a
lane (`Lane.write_flag`) or the CPU worker.

A GPU that waits for a flag waits forever. Code that ends a writer must therefore call `Flags.abort`: it lets every wait
pass, and makes every later use raise, because the data that the flag announces was never computed.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import threading
import time
import weakref
from collections.abc import Callable

import torch

from ...core.errors import LaneError, StorageError
from ...core.sizes import round_up
from ...core.tags import Tag
from ...native import flag_words
from ...native.worker.jobs import FlagValue
from ..books.ledger import Ledger
from ..cuda.driver import Driver, DriverError, device_index, driver
from ..cuda.streams import OwnStream
from ..host.arena import PAGE, HostArena
from ..host.pinning import PageLock

_SPACING = 64  # a cache line each, so that a polling core does not slow the writer of the neighbour


def board_bytes(count: int) -> int:
    """Bytes charged for a board of ``count`` flags."""
    return round_up((count + 1) * _SPACING, PAGE)


class Flag:
    """One word. It keeps its board, and with it the memory, alive."""

    __slots__ = ("address", "board", "device_address")

    def __init__(self, board: Flags, address: int, device_address: int | None) -> None:
        self.board, self.address = board, address
        self.device_address = device_address  # None if no stream can write it or wait for it

    def at(self, value: int) -> FlagValue:
        """This flag with a value, in the form that the CPU worker takes."""
        return FlagValue(self.address, value, owner=self.board)

    def read(self) -> int:
        return flag_words.load(self.address)

    def set(self, value: int) -> None:
        """Raise the flag to ``value``; a thread that sees it sees everything that this thread wrote before."""
        with self.board.lock:
            self.board.raise_if_aborted()
            flag_words.store(self.address, value)

    def expect(self, value: int) -> None:
        """Note that a stream is about to wait for ``value``; call before the wait is enqueued. See ``Flags.abort``."""
        with self.board.lock:
            self.board.raise_if_aborted()
            awaited = self.board.awaited.get(self.address, 0)
            self.board.awaited[self.address] = value if flag_words.has_reached(value, awaited) else awaited

    def wait(self, value: int, timeout_s: float | None = None) -> bool:
        """Block until the flag has reached ``value``; False if ``timeout_s`` passed first. Raises if the board is
        aborted meanwhile. Ctrl-C gets through."""
        deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        while True:
            left = deadline - time.monotonic()
            arrived = flag_words.wait(self.address, value, max(0.0, min(0.1, left)))
            self.board.raise_if_aborted()
            if arrived or left <= 0:
                return arrived


class Flags:
    """A board of flags, all zero at first. ``on_stream``: whether CUDA streams can write them and wait for them.
    ``aborted`` is one more word, 0 until ``abort``: jobs of the CPU worker that name it are dropped instead of run."""

    def __init__(self, count: int, *, ledger: Ledger, device: torch.device, page_lock: PageLock | None = None) -> None:
        self.lock = threading.RLock()
        self.awaited: dict[int, int] = {}  # address -> the latest value that a stream waits for
        self._error: BaseException | None = None
        self._causes: list[Callable[[], Callable[[], BaseException | None] | None]] = []  # see `watch`
        self._arena = HostArena((count + 1) * _SPACING, ledger=ledger, tag=Tag.STAGING, page_lock=page_lock)
        # Kept as long as the board, closed or not: a worker's job or a reader may still look at a word.
        self._words = words = self._arena.tensor(((count + 1) * _SPACING,), torch.uint8, alignment=_SPACING)
        cuda = driver() if device.type == "cuda" and self._arena.pinned else None
        offset = None if cuda is None else _stream_offset(cuda, words.data_ptr(), device)
        self.on_stream = offset is not None
        addresses = range(words.data_ptr(), words.data_ptr() + (count + 1) * _SPACING, _SPACING)
        self._flags = [Flag(self, a, None if offset is None else a + offset) for a in addresses]
        self.aborted = self._flags.pop()
        # Runs at exit and when the board is dropped, before its memory goes: no GPU may be left waiting.
        self._finalizer = weakref.finalize(self, _let_go, self.awaited, self.aborted.address, words)

    def __getitem__(self, index: int) -> Flag:
        return self._flags[index]

    def __len__(self) -> int:
        return len(self._flags)

    def abort(self, error: BaseException) -> None:
        """Let every wait of a stream pass and make later uses raise LaneError from ``error``, the first one. The
        streams then work on stale data: jobs that name ``aborted`` are dropped, so that none of it reaches home."""
        with self.lock:
            self._error = self._error or error
            _let_go(self.awaited, self.aborted.address)

    def watch(self, cause: Callable[[], BaseException | None]) -> None:
        """Before each use, check whether a native thread has written ``aborted`` itself; ``cause`` gives its error, or
        None if it was none of its threads. The owner of a method is not kept: it has a worker, whose jobs keep the
        board."""
        self._causes.append(weakref.WeakMethod(cause) if inspect.ismethod(cause) else lambda: cause)

    @property
    def is_aborted(self) -> bool:
        if self._error is None and self._causes and self.aborted.read():
            with self.lock:
                if self._error is None:  # else another thread aborts right now
                    causes = [cause for reference in self._causes if (cause := reference()) is not None]
                    errors = [error for cause in causes if (error := cause()) is not None]
                    self.abort(errors[0] if errors else LaneError("work on home memory has failed"))
        return self._error is not None

    def raise_if_aborted(self) -> None:
        if self._error is None and not self._causes:
            return
        if self.is_aborted:
            if isinstance(self._error, StorageError):  # says all that the user can use
                raise again(self._error)
            raise LaneError(f"A writer of this flag ended early: {self._error}") from self._error

    def close(self) -> None:
        """Release every wait, the page-lock and the charge. The lanes that used the flags must be empty. Safe to call
        twice."""
        self.abort(LaneError("the flags were closed"))
        self._finalizer.detach()
        self._arena.close()


def again(error: StorageError) -> StorageError:
    """The same error, to be raised by another call, or on another thread."""
    repeated = StorageError(str(error))
    repeated.errno, repeated.__cause__ = error.errno, error
    return repeated


def _let_go(awaited: dict[int, int], aborted: int, words: torch.Tensor | None = None) -> None:  # noqa: ARG001
    """Mark the board as aborted, then raise every flag to the value that a stream waits for. ``words`` keeps the memory
    until then."""
    flag_words.store(aborted, 1)
    for address, value in list(awaited.items()):
        flag_words.store(address, value)


def _stream_offset(cuda: Driver, start: int, device: torch.device) -> int | None:
    """Device address minus host address of the words, or None if streams of ``device`` cannot write or await them."""
    word, index = ctypes.c_uint32.from_address(start), device_index(device)
    try:
        address, own = cuda.device_address(index, start), OwnStream(cuda, index)  # which comes back when it is dropped
        cuda.write_value(index, own.stream.cuda_stream, address, 1)
        cuda.wait_value(index, own.stream.cuda_stream, address, 1)
        deadline = time.monotonic() + 2
        event = torch.cuda.Event()
        event.record(own.stream)
        while not event.query() and time.monotonic() < deadline:
            time.sleep(1e-4)
        worked = bool(event.query())
        word.value = 1  # in any case, let the stream get past its wait
    except DriverError:
        return None
    word.value = 0
    return address - start if worked else None
