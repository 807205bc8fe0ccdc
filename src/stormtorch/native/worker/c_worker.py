"""The worker on the C pool (csrc/worker.c). Python only hands over jobs and keeps their tensors alive."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import weakref

from ...core.errors import LaneError, SettingError
from ..library import FlagWord, Library, PoolStats
from .jobs import FlagValue, Job, Worker, WorkerStats, closed, refuse_after_fork

_REAP = 16  # tickets fetched at once


def _word(flag: FlagValue | None) -> FlagWord:
    if flag is None:
        return FlagWord(None, 0)
    assert flag.address > 0, "a flag without an address would never gate anything"
    return FlagWord(flag.address, flag.value & 0xFFFFFFFF)


class _Pool:
    """The C object and what it needs alive. Separate from the worker, so that it can outlive it for its own ending.

    A job's tensors are released after the lock: with a tensor goes everything that its owner has attached to it, and
    that may call the worker. The lock is re-entrant, because the garbage collector or a signal handler may interrupt a
    call.

    Made without threads: the finalizer that ends them must exist before they start, as Ctrl-C may come right after."""

    def __init__(self, library: Library) -> None:
        self.library, self.c = library, library.c
        self.pid = os.getpid()
        self.pointer = ctypes.c_void_p()
        self.lock = threading.RLock()
        self.tickets = itertools.count(1)
        self.held: dict[int, object] = {}  # ticket → a job that may still be running
        self.over = (ctypes.c_int64 * _REAP)()  # the tickets last fetched
        self.counted = PoolStats()  # when last asked
        self.stopped = False

    def start(self, threads: int, cores: list[int]) -> None:
        mask = (ctypes.c_int32 * len(cores))(*cores)
        isa = self.library.isas[self.library.isa]
        status = self.c.storm_pool_open(mask, len(cores), threads, isa, ctypes.byref(self.pointer))
        if status != 0:
            raise SettingError(
                f"Cannot start {threads} threads on cores {cores}: {os.strerror(-status)}. "
                f"Accepted: CPU ids out of {sorted(os.sched_getaffinity(0))}, and as many threads as the system allows."
            )

    def reap(self) -> list[object]:
        """Take out the tensors and flags of finished jobs, to be released by the caller. Needs the lock."""
        gone: list[object] = []
        while self.pointer:
            # Those fetched last time come first, mostly in vain: Ctrl-C may have ended that call right after C's.
            gone += [self.held.pop(ticket, None) for ticket in self.over]
            if self.c.storm_pool_reap(self.pointer, self.over, _REAP) == 0:
                break
        return gone

    def stats(self) -> WorkerStats:
        """Statistics so far. Needs the lock."""
        if self.pointer:
            self.c.storm_pool_read_stats(self.pointer, ctypes.byref(self.counted))
        return WorkerStats(**{name: getattr(self.counted, name) for name, *_ in PoolStats._fields_})

    def stop(self) -> int:
        if os.getpid() != self.pid:  # threads and jobs remained in the parent
            return 0
        gone: dict[int, object] = {}
        with self.lock:
            if not self.stopped:
                if self.pointer:
                    self.c.storm_pool_stop(self.pointer)
                self.stopped = True
                gone, self.held = self.held, gone
            abandoned = self.stats().abandoned
        gone.clear()
        return abandoned

    def end(self) -> None:
        """End the threads when the worker was collected, or the interpreter exits."""
        if os.getpid() == self.pid:
            self.stop()
            with self.lock:
                if self.pointer:
                    self.c.storm_pool_free(self.pointer)
                    self.pointer = ctypes.c_void_p()


class PoolWorker(Worker):
    """Native threads that never need the GIL."""

    def __init__(self, library: Library, *, threads: int, cores: list[int]) -> None:
        self.threads = threads
        self._pool = _Pool(library)
        self._finalizer = weakref.finalize(self, self._pool.end)
        self._pool.start(threads, cores)

    def _submit(self, job: Job) -> int:
        pool = self._pool
        refuse_after_fork(pool.pid)
        update, words = job.tensors.bind(job.scalars), [_word(flag) for flag in (job.ready, job.done, job.abort)]
        with pool.lock:
            if pool.stopped:
                raise closed()
            ticket = next(pool.tickets)
            pool.held[ticket] = job  # before the call: Ctrl-C may come right after it
            status = pool.c.storm_pool_submit(pool.pointer, update, ticket, job.priority, *words)
            if status < 0:
                pool.held.pop(ticket, None)
                raise LaneError(f"The worker did not take the job: {os.strerror(-status)}.")
            gone = pool.reap()
        gone.clear()
        return ticket

    def stats(self) -> WorkerStats:
        pool = self._pool
        refuse_after_fork(pool.pid)
        with pool.lock:
            gone = pool.reap()
            stats = pool.stats()
        gone.clear()
        return stats

    def close(self) -> int:
        return self._pool.stop()
