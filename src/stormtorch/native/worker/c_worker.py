"""Workers on the C pool (csrc/worker.c). Python only hands over jobs and keeps their tensors alive."""

from __future__ import annotations

import ctypes
import os
import threading

from ...core.errors import LaneError, SettingError
from ..library import FlagWord, Library, PoolStats
from .jobs import Engine, FlagValue, Request, WorkerStats, closed

_REAP = 16  # tickets fetched at once


def word(flag: FlagValue | None) -> FlagWord:
    """The C form."""
    return FlagWord(None, 0) if flag is None else FlagWord(flag.address, flag.value & 0xFFFFFFFF)


class CPool(Engine):
    """Native threads that never need the GIL.

    A job's tensors are released after the lock: with a tensor goes everything that its owner has attached to it, and
    that may call the worker. The lock is re-entrant, because the garbage collector or a signal handler may interrupt a
    call."""

    def __init__(self, library: Library, *, threads: int, cores: list[int]) -> None:
        super().__init__(threads)
        self.library, self.c, self.cores = library, library.c, cores
        self.pointer = ctypes.c_void_p()
        self.lock = threading.RLock()
        self.held: dict[int, Request] = {}  # ticket → a job that may still be running
        self.over = (ctypes.c_int64 * _REAP)()  # the tickets last fetched
        self.fetched = 0  # how many
        self.counted = PoolStats()  # when last asked
        self.stopped = False

    def start(self) -> None:
        count, isa = len(self.cores), self.library.isas[self.library.isa]
        mask = (ctypes.c_int32 * count)(*self.cores)
        status = self.c.storm_pool_open(mask, count, self.threads, isa, ctypes.byref(self.pointer))
        if status != 0:
            raise SettingError(
                f"Cannot start {self.threads} threads on cores {self.cores}: {os.strerror(-status)}. "
                f"Accepted: CPU ids out of {sorted(os.sched_getaffinity(0))}, and as many threads as the system allows."
            )

    def add(self, job: Request) -> int:
        words = [word(flag) for flag in (job.ready, job.also, job.done, job.abort)]
        with self.lock:
            if self.stopped:
                raise closed()
            ticket = next(self.tickets)
            self.held[ticket] = job  # before the call: Ctrl-C may come right after it
            status = job.submit(self.c, self.pointer, ticket, words)
            if status < 0:
                self.held.pop(ticket, None)
                raise LaneError(f"The worker did not take the job: {os.strerror(-status)}.")
            gone = self._reap()
        gone.clear()
        return ticket

    def _reap(self) -> list[object]:
        """Take out the tensors and flags of finished jobs, to be released by the caller. Needs the lock."""
        gone: list[object] = []
        while self.pointer:
            for ticket in self.over[: self.fetched]:
                job = self.held.pop(abs(ticket), None)
                gone.append(job)
                if ticket < 0 and job is not None and job.dropped is not None:
                    job.dropped.add(-ticket)
            self.fetched = _REAP  # as far as is known if Ctrl-C comes right after C's call
            self.fetched = self.c.storm_pool_reap(self.pointer, self.over, _REAP)
            if self.fetched == 0:
                break
        return gone

    def stats(self) -> WorkerStats:
        with self.lock:
            gone = self._reap()
            if self.pointer:
                self.c.storm_pool_read_stats(self.pointer, ctypes.byref(self.counted))
            stats = WorkerStats(**{name: getattr(self.counted, name) for name, *_ in PoolStats._fields_})
        gone.clear()
        return stats

    def stop(self) -> int:
        if os.getpid() != self.pid:  # threads and jobs remained in the parent
            return 0
        gone: dict[int, Request] = {}
        over: list[object] = []
        with self.lock:
            if not self.stopped:
                if self.pointer:
                    self.c.storm_pool_stop(self.pointer)
                self.stopped = True
                over = self._reap()
                gone, self.held = self.held, gone
            abandoned = self.stats().abandoned
        gone.clear()
        over.clear()
        return abandoned

    def end(self) -> None:
        if os.getpid() == self.pid:
            self.stop()
            with self.lock:
                if self.pointer:
                    self.c.storm_pool_free(self.pointer)
                    self.pointer = ctypes.c_void_p()
