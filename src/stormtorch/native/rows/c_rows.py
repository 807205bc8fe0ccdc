"""Threads of csrc/rows.c."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque

from ...core.errors import LaneError, SettingError
from ..library import Library, library
from ..moves import Move, in_c, read_at, write_at
from .jobs import PENDING, RowsJob, RowsPool, check_process, closed

_SLICE_S = 0.1  # longest time inside C per call, so that Ctrl-C is noticed
_START = ctypes.c_char * 0  # its place in an array, for a third of the time that numpy takes


class _Native:
    """The C object and what its jobs need. Separate from the pool, so that it can outlive it for its own ending.

    Made without threads: the finalizer that ends them must exist before they start, as Ctrl-C may come right after.
    """

    def __init__(self, c: ctypes.CDLL) -> None:
        self.c, self.pid, self.lock = c, os.getpid(), threading.RLock()
        self.pointer = ctypes.c_void_p()
        self.held: deque[RowsJob] = deque()  # jobs that may still be running, in order
        self.inside = 0  # threads inside a C call without the lock
        self.stopped = False

    def start(self, threads: int, stage_bytes: int) -> None:
        status = self.c.storm_rows_open(threads, stage_bytes, ctypes.byref(self.pointer))
        if status != 0:
            raise SettingError(
                f"Cannot start {threads} threads to read with: {os.strerror(-status)}. "
                "Accepted: at least one, and as many as the system allows."
            )

    def stop(self) -> None:
        if os.getpid() != self.pid:  # the threads remained in the parent
            return
        gone: deque[RowsJob] = deque()
        with self.lock:
            if not self.stopped:
                if self.pointer:
                    self.c.storm_rows_stop(self.pointer)
                self.stopped = True
                gone, self.held = self.held, gone
        gone.clear()  # after the lock: finalizers of what they held may call anything

    def end(self) -> None:
        """End the threads when the pool was collected, or the interpreter exits."""
        if os.getpid() != self.pid:
            return
        self.stop()
        with self.lock:
            if self.inside == 0 and self.pointer:  # else a daemon thread waits at exit: it goes with the process
                self.c.storm_rows_free(self.pointer)
                self.pointer = ctypes.c_void_p()


class NativeRows(RowsPool):
    """The pool of csrc/rows.c."""

    def __init__(
        self,
        native: Library,
        threads: int,
        stage_bytes: int = 0,
        *,
        read: Move = read_at,
        write: Move = write_at,
    ) -> None:
        super().__init__(threads)
        self._native = _Native(native.c)
        self._load_state, self._submit = native.c.storm_load_flag, native.c.storm_rows_submit
        self._finalizer = weakref.finalize(self, self._native.end)
        self._native.start(threads, stage_bytes)
        if (read, write) != (read_at, write_at):
            self._calls = in_c(read), in_c(write)  # kept as long as C may call them
            native.c.storm_rows_replace(self._native.pointer, *self._calls)

    def start(self, job: RowsJob) -> None:
        native = self._native
        check_process(native.pid)
        with native.lock:
            if native.stopped:
                raise closed()
            native.held.append(job)  # before the call: Ctrl-C may come right after it
            address = ctypes.addressof(_START.from_buffer(job.pieces.data))
            status = self._submit(native.pointer, address, len(job.pieces), job.write, job.unit, job.outcome)
            if status != 0:
                native.held.remove(job)
                raise LaneError(f"The threads that read did not take the job: {os.strerror(-status)}.")
        held = native.held
        while held and self._load_state(held[0].address) != PENDING:  # from the oldest on
            held[0].let_go()
            held.popleft()

    def state(self, job: RowsJob) -> int:
        return int(self._load_state(job.address))

    def wait(self, job: RowsJob, *, help: bool = False) -> int:
        if (state := int(self._load_state(job.address))) != PENDING:
            return state
        native = self._native
        check_process(native.pid)
        with native.lock:
            if native.stopped:
                return self.state(job)
            native.inside += 1
        try:
            while state == PENDING:
                state = int(native.c.storm_rows_wait(native.pointer, job.outcome, _SLICE_S, help))
            return state
        finally:
            with native.lock:
                native.inside -= 1

    def drop(self, job: RowsJob | None = None) -> None:
        native = self._native
        with native.lock:
            if not native.stopped and os.getpid() == native.pid:
                native.c.storm_rows_cancel(native.pointer, None if job is None else job.outcome)

    def finish(self) -> None:
        if os.getpid() == self._native.pid:
            for job in list(self._native.held):
                self.wait(job)

    def close(self) -> None:
        self._native.stop()


def map_file(fd: int, size: int) -> int:
    """Map the first ``size`` bytes of a file, to copy from; returns the address, or 0 if that is not possible.

    An unreadable page does not crash: the piece is then read from the file. End it with ``unmap_file``.
    """
    native = library()
    if native is None or size == 0:
        return 0
    address = ctypes.c_void_p()
    status = native.c.storm_rows_map(fd, size, ctypes.byref(address))
    return 0 if status != 0 else address.value or 0


def unmap_file(address: int, size: int) -> None:
    """Unmap it. No job may use the map any more."""
    native = library()
    assert native is not None
    native.c.storm_rows_unmap(address, size)
