"""Requests: transfers between a buffer and a range of an open file.

A request is cut into blocks. Up to ``threads`` runners of the file's pool each take the next free block, until none is
left or one has failed; the last runner to leave resolves the one future of the whole. So a request is never half
resolved: while its future is pending a thread may still touch the buffer, and once it is done none will.

Short transfers. The kernel may move less than it was asked to. The loop goes on from where it stopped; with direct I/O
from the alignment boundary before that place, moving a few bytes twice, because the kernel takes no other offset. Only
a call that reaches no further than an earlier one counts as a stall. End of file is a permanent stall, and some cases
look like a temporary one (a file cut inside a sector returns the same few bytes for ever), so stalls are counted and
end in an error with the numbers.

The tail. Direct I/O takes no unaligned length either. The bytes of a request beyond the last whole alignment unit go
through a bounce block of one unit. A write reads that unit first and keeps the bytes behind the request, unless the
caller says that there are none. No lock is needed for that: starts are aligned, so two requests that share a unit
overlap anyway.

Ctrl-C may come at any instruction of the main thread. Inside the start of a thread it leaves one that the pool does not
know, so the queue itself counts the running runners and closes the descriptor after the last. Between two runners it
leaves a request whose future the caller never gets: runners that have not begun are withdrawn, and the others end with
their block. A Ctrl-C just before the main thread falls asleep on a lock is not seen until it wakes, so waiting for a
future wakes up now and then.

A fork copies the file without its threads, and the locks in any state. So the child touches none of them: every use is
refused by the process number alone, and ``close`` only closes the child's descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.errors import SettingError, StorageError
from ...core.events import Sink, Span, What
from ...core.sizes import round_down
from .calls import ELSEWHERE, Descriptor, storage_error

_STALLS = 8
_TICK_S = 0.2


class Transfer(Future[int]):
    """The future of a request: its number of bytes. Ctrl-C gets through within a tick, however slow the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    def result(self, timeout: float | None = None) -> int:
        if os.getpid() != self._process and not self.done():
            raise StorageError(
                "Cannot wait for this request: it runs in the process that made it. Open the file again "
                "after the fork, and repeat it."
            )
        if timeout is None:
            _wait(self)
        return super().result(timeout)


def _wait(future: Future[Any]) -> None:
    """Block until ``future`` is done. Checks ``done``, since its own error may be a TimeoutError too (ETIMEDOUT)."""
    while not future.done():
        with contextlib.suppress(TimeoutError):
            Future.exception(future, _TICK_S)


@dataclass(slots=True)
class Ending:
    """A call at the end of a request, just before its future resolves."""

    call: Callable[[], None]
    owed: bool = False  # the request has begun, so it will make the call, even if starting it raises


class RequestQueue:
    """One descriptor, which it owns, and the threads that serve it; they start when first needed."""

    def __init__(
        self,
        descriptor: Descriptor,
        *,
        alignment: int,
        threads: int,
        block_bytes: int,
        sink: Sink | None,
    ) -> None:
        self.name, self.calls = descriptor.name, descriptor.calls
        self.alignment, self.block_bytes, self.sink = alignment, block_bytes, sink
        self.closed = False
        self.cancelled = False
        self._descriptor = descriptor  # requests hold the queue, so none is running when the last holder drops it
        self._threads = threads
        self._lock = threading.Lock()
        self._at_work = 0  # runners that may use the descriptor
        self._all_left = threading.Condition(self._lock)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="storm-file")

    @property
    def fd(self) -> int:
        """The kernel's number; negative once closed."""
        return self._descriptor.number

    def submit(self, request: Request) -> Transfer:
        """Start it, or raise before anything moved; Ctrl-C may raise later; the request's ``ending`` then shows it."""
        self.refuse_after_fork()
        request.check_alignment()
        with self._lock:
            self._refuse_if_closed()
            request.start(self._pool, min(self._threads, -(-request.size // self.block_bytes)))
        if not request.size:
            request.resolve()
        return request.future

    def flush(self) -> None:
        """Block until the kernel has made every finished write durable."""
        self.refuse_after_fork()
        with self._lock:
            self._refuse_if_closed()
            done = self._pool.submit(self._sync)  # on the pool: close waits for it, Ctrl-C need not
        _wait(done)
        try:
            done.result()
        except OSError as error:
            raise storage_error(f"flush {self.name}", error) from error

    def close(self, *, cancel: bool) -> None:
        """Refuse new requests, wait for the accepted ones (with ``cancel`` only for running blocks), close."""
        try:
            if self._descriptor.inherited:
                self.closed = True
                self._descriptor.close()
                return
            with self._lock:
                self.closed = True
                self.cancelled |= cancel
            self._pool.shutdown(wait=True)
            with self._lock:
                while self._at_work:
                    self._all_left.wait(_TICK_S)
                self._descriptor.close()  # under the lock: a runner that the pool did not know may come just now
        except OSError as error:
            raise storage_error(f"close {self.name}", error) from error

    def refuse_after_fork(self) -> None:
        """Raise in a process that has no threads to serve this file. Runs before any lock; see the top."""
        if self._descriptor.inherited:
            raise StorageError(
                f"Cannot use {self.name}: it belongs to the process it was opened in; open it again after the fork."
            )

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[bool]:
        """Keep the descriptor open while another thread uses it. Yields False if it is closed already."""
        with self._lock:
            is_open = self.fd >= 0
            self._at_work += 1
        try:
            yield is_open
        finally:
            with self._lock:
                self._at_work -= 1
                self._all_left.notify_all()

    def _sync(self) -> None:
        with self.kept_open() as is_open:
            if is_open:
                self.calls.sync(self.fd)

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise StorageError(f"Cannot use {self.name}: it is closed. Open it again.")


class Request:
    """Bytes between one buffer and ``[offset, offset + size)`` of a file. ``future`` gives their number or raises.

    The future cannot be cancelled, since a block that the kernel is filling cannot be; ``stop`` skips the rest.
    """

    def __init__(
        self,
        queue: RequestQueue,
        view: memoryview,
        offset: int,
        *,
        write: bool,
        padded: bool = False,
        ending: Ending | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """``padded``: the bytes between the end of this write and the next alignment boundary may be overwritten.

        ``stop``, once set, lets no further block begin.
        """
        self.future = Transfer()
        self.future.set_running_or_notify_cancel()
        self._queue, self._write, self._padded, self._ending = queue, write, padded, ending
        self._stop = stop or threading.Event()
        self._view: memoryview | None = view
        self.size, self._offset, self._end = len(view), offset, offset + len(view)
        self._next = offset  # the first byte of the next block
        self._lock = threading.Lock()
        self._waiting: set[int] = set()  # runners that the pool has not begun
        self._running = 0
        self._error: BaseException | None = None
        self._start_s = time.perf_counter()

    def check_alignment(self) -> None:
        """Raise SettingError where direct I/O needs another offset or address."""
        unit, offset, view = self._queue.alignment, self._offset, self._view
        if unit > 1 and view:
            address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
            if offset % unit or address % unit:
                raise SettingError(
                    f"Direct I/O on {self._queue.name} needs offset and address at multiples of {unit}: offset "
                    f"{offset} is {offset % unit} past one, address {address:#x} is {address % unit} past one. Take a "
                    "page-aligned buffer, such as torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8), or open "
                    "the file with direct=False."
                )

    def start(self, pool: ThreadPoolExecutor, runners: int) -> None:
        """Queue ``runners`` of them; does not block. With at least one runner, the future always resolves.

        The caller holds the queue's lock, without which no runner gets to its first block.
        """
        try:
            if runners and self._ending is not None:
                self._ending.owed = True
            self._waiting = set(range(runners))
            for runner in range(runners):
                pool.submit(self._run, runner)
        except RuntimeError as error:  # no thread could be started, or the interpreter is exiting
            failure = StorageError(
                f"Cannot {self._words(self._offset)}: {error}. Raise ulimit -u, or use fewer threads."
            )
            failure.__cause__ = error
            self._leave(failure, withdraw=True)
        except BaseException:
            self._stop.set()  # the caller will not get the future, so blocks that have not begun are not wanted
            self._leave(None, withdraw=True)
            raise

    def resolve(self) -> None:
        """Release the buffer, tell the sink, then resolve the future. Called once, after the last runner has left."""
        error, self._error, self._view = self._error, None, None
        if isinstance(error, StorageError):
            # Tracebacks hold frames that hold the buffer; a future that user code keeps must not keep gigabytes.
            error.__traceback__ = None
            if error.__cause__ is not None:
                error.__cause__.__traceback__ = None
        if error is None and self._next < self._end:
            why = "its caller was interrupted" if self._stop.is_set() else "its file was closed"
            error = StorageError(
                f"Cannot {self._words(self._next)}: cancelled, because {why}. Repeat it if still wanted."
            )
            error.errno = errno.ECANCELED
        if self._ending is not None:
            self._ending.call()
        if error is None and self._queue.sink is not None:
            what = What.WRITE if self._write else What.READ
            try:
                self._queue.sink(Span(what, self._start_s, time.perf_counter(), self._queue.name, bytes=self.size))
            except BaseException as broken:  # a sink must not raise, not even SystemExit; else the caller is told
                error = broken
        if error is None:
            self.future.set_result(self.size)
        else:
            self.future.set_exception(error)

    def _run(self, runner: int) -> None:
        with self._lock:
            if runner not in self._waiting:  # withdrawn: the pool queued it, then raised
                return
            self._waiting.remove(runner)
            self._running += 1
        with self._queue.kept_open() as is_open:
            error: BaseException | None = None
            try:
                while is_open and self._move_next():
                    pass
            except BaseException as failure:
                error = failure
            self._leave(error)

    def _leave(self, error: BaseException | None, *, withdraw: bool = False) -> None:
        """End one running runner, or with ``withdraw`` those that have not begun; the last resolves the future."""
        with self._lock:
            self._error = self._error or error
            if withdraw:
                self._waiting.clear()
            else:
                self._running -= 1
            last = not self._running and not self._waiting
        if last:
            self.resolve()

    def _move_next(self) -> bool:
        """Move the next block; False if none is left or wanted."""
        with self._lock:
            begin = self._next
            if begin == self._offset:
                self._start_s = time.perf_counter()  # time in the queue is not the disk's
            stopped = self._queue.cancelled or self._stop.is_set()
            if stopped or self._error is not None or begin == self._end:
                return False
            self._next = min(begin + self._queue.block_bytes, self._end)
            assert self._view is not None
            view = self._view[begin - self._offset : self._next - self._offset]
        self._move_block(view, begin)
        return True

    def _move_block(self, view: memoryview, offset: int) -> None:
        unit = self._queue.alignment
        whole = round_down(len(view), unit)
        self._move(view[:whole], offset, whole, write=self._write)
        tail, offset = view[whole:], offset + whole
        if not len(tail):
            return
        bounce = memoryview(mmap.mmap(-1, unit))
        if not self._write:
            self._move(bounce, offset, len(tail), write=False)
            tail[:] = bounce[: len(tail)]
            return
        if not self._padded:
            self._move(bounce, offset, unit, write=False)
        bounce[: len(tail)] = tail
        self._move(bounce, offset, unit, write=True)

    def _move(self, view: memoryview, offset: int, wanted: int, *, write: bool) -> None:
        """Move at least the first ``wanted`` bytes of ``view``; the module's docstring explains short transfers."""
        queue = self._queue
        call = queue.calls.pwrite if write else queue.calls.pread
        position = got = stalls = 0
        while got < wanted:
            try:
                count = call(queue.fd, view[position:], offset + position)
            except OSError as error:
                raise storage_error(self._words(offset + position, offset + wanted, write=write), error) from error
            if position + count > got:
                got, stalls = position + count, 0
            else:
                stalls += 1
            if count == 0 or stalls == _STALLS:
                what = f"{self._words(offset, offset + wanted, write=write)}: wanted {wanted} bytes, got {got}"
                size = os.fstat(queue.fd).st_size
                if not write and offset + got >= size:
                    what += f". The file is truncated: it has {size} bytes now. Restore it, or read less of it."
                else:
                    what += f", and no call moves more. Look at dmesg and the health of the disk, {ELSEWHERE}"
                raise StorageError(f"Cannot {what}")
            position = round_down(got, queue.alignment)

    def _words(self, begin: int, end: int | None = None, *, write: bool | None = None) -> str:
        verb = "write" if (self._write if write is None else write) else "read"
        return f"{verb} bytes {begin} to {self._end if end is None else end} of {self._queue.name}"
