"""The worker without the C library: one Python thread that runs the torch fallback. Same interface, same order, slower.

Torch's operations release the GIL and use their own threads, so a choice of threads and cores has no effect here.

Ctrl-C can end a call between any two of its operations, and the garbage collector can drop a worker on any thread, the
worker's own included. So there is no counter beside the lists that could disagree with them, and only the worker's
thread takes jobs off them: other threads add a job, or ask it to stop. Code enters the lock itself, never its
condition, whose ``__enter__`` is Python that Ctrl-C can end with the lock taken; for the same reason only the worker's
thread waits on the condition.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import threading
import time
import weakref
from dataclasses import dataclass

import torch

from ...core.errors import LaneError
from .. import fallback
from ..library import Scalars
from ..update import AdamStep, AdamTensors
from .jobs import FlagValue, Worker, WorkerStats, check_job

_POLL_S = 0.0002  # a Python thread that wakes more often takes the GIL from the thread that launches
_IDLE_S = 1.0  # between two checks without jobs: the collector may call stop here while the thread is about to sleep
_DRAIN_S = 0.001  # between two checks of a waiting caller; also the delay of a Ctrl-C just before its sleep


@dataclass(slots=True, eq=False)
class _Job:
    tensors: AdamTensors
    scalars: Scalars
    priority: int
    ticket: int
    ready: FlagValue | None
    done: FlagValue | None
    abort: FlagValue | None
    begun: bool = False
    next: int = 0  # elements already updated
    scale: torch.Tensor | float | None = None  # fallback.read_scale, once begun

    def __lt__(self, other: _Job) -> bool:
        return (self.priority, self.ticket) < (other.priority, other.ticket)

    def is_ready(self) -> bool:
        return self.ready is None or self.ready.reached()

    def is_aborted(self) -> bool:
        return self.abort is not None and self.abort.reached()

    def write_done(self) -> None:
        if self.done is not None:
            self.done.write()


class _Queue:
    """The jobs and the loop that runs them. Separate from the worker, which the thread must not keep alive.

    Made without its thread: the finalizer that ends it must exist before it starts, as Ctrl-C may come right after.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()  # guards everything below
        self.changed = threading.Condition(self.lock)  # the thread should check again
        self.waiting: list[_Job] = []
        self.ready: list[_Job] = []  # heap; a job remains here until it is over
        self.tickets = itertools.count(1)
        self.finished = self.abandoned = self.elements = 0
        self.busy_s = 0.0
        self.stopping = False
        self.error: BaseException | None = None
        self.error_was_raised = False
        self.thread = threading.Thread(target=self._loop, name="storm-adam-0", daemon=True)

    def start(self) -> None:
        self.thread.start()

    @property
    def pending(self) -> int:
        return len(self.waiting) + len(self.ready)

    def _loop(self) -> None:
        try:
            while (job := self._take()) is not None:
                last = min(job.next + fallback.CHUNK, job.tensors.numel)
                start = time.perf_counter()
                if job.scale is None:  # not earlier: the writer of the ready flag writes the factor before it
                    job.scale = fallback.read_scale(job.tensors, job.scalars)
                fallback.update_(job.tensors, job.scalars, job.next, last, job.scale)
                with self.lock:
                    self.busy_s += time.perf_counter() - start
                    self.elements += last - job.next
                    job.next = last
                    if last == job.tensors.numel:
                        heapq.heappop(self.ready)  # this job: only _take adds to the heap
                        self.finished += 1
                        job.write_done()
                del job  # a sleeping thread must not keep the last tensors alive
        except BaseException as error:  # raised again, chained, on the thread that makes the next call
            with self.lock:
                self.error, self.stopping = error, True
                gone = self.waiting + self.ready
                self.waiting, self.ready = [], []
                self._abandon(gone)

    def _take(self) -> _Job | None:
        """The most urgent ready job, left on the heap; blocks until there is one. None: the thread should end."""
        while True:
            with self.lock:
                gone = self._look_at_flags()
                if self.ready:
                    self.ready[0].begun = True
                    return self.ready[0]
                if self.stopping and not self.waiting:
                    return None
                if not gone:
                    self.changed.wait(_POLL_S if self.waiting else _IDLE_S)
            gone.clear()  # after the lock: finalizers of their tensors may need it

    def _look_at_flags(self) -> list[_Job]:
        """Move ready jobs to the heap; returns abandoned ones. Checks abort flags last: see csrc/worker.c."""
        gone: list[_Job] = []
        looked_at, self.waiting = self.waiting, []
        for job in looked_at:
            if job.is_ready():
                heapq.heappush(self.ready, job)
            elif self.stopping or job.is_aborted():
                gone.append(job)
            else:
                self.waiting.append(job)
        if self.stopping:
            gone += [job for job in self.ready if not job.begun]
            self.ready = sorted(job for job in self.ready if job.begun)
        while self.ready and not self.ready[0].begun and self.ready[0].is_aborted():
            gone.append(heapq.heappop(self.ready))
        self._abandon(gone)
        return gone

    def _abandon(self, jobs: list[_Job]) -> None:
        self.abandoned += len(jobs)
        for job in jobs:
            job.write_done()

    def stop(self) -> None:
        if os.getpid() != self.pid:  # the thread remained in the parent
            return
        with self.lock:
            self.stopping = True
            self.changed.notify_all()
        if threading.current_thread() is not self.thread and self.thread.is_alive():
            self.thread.join()  # not if the worker was collected on the thread itself: it then ends by itself


class ThreadWorker(Worker):
    """A Python thread instead of the native ones."""

    def __init__(self, *, threads: int, cores: list[int]) -> None:
        self.threads, self.cores = threads, cores
        self._queue = _Queue()
        self._finalizer = weakref.finalize(self, self._queue.stop)
        self._queue.start()

    def _own(self) -> _Queue:
        if os.getpid() != self._queue.pid:
            raise LaneError(
                f"This worker belongs to process {self._queue.pid}; its thread does not exist after the fork "
                f"into {os.getpid()}. Open another one there."
            )
        return self._queue

    def _raise_error(self) -> None:
        queue = self._queue
        if queue.error is not None:
            queue.error_was_raised = True
            raise LaneError(
                f"The optimizer's worker failed: {queue.error!r}. {queue.abandoned} jobs were abandoned; "
                "the tensors of the one that failed are partly updated."
            ) from queue.error

    def submit(
        self,
        tensors: AdamTensors,
        step: AdamStep,
        *,
        priority: int = 0,
        ready: FlagValue | None = None,
        done: FlagValue | None = None,
        abort: FlagValue | None = None,
    ) -> int:
        check_job(tensors, priority)
        queue = self._own()
        with queue.lock:
            self._raise_error()
            if queue.stopping:
                raise LaneError("Cannot submit to a worker that was closed. Open another one.")
            ticket = next(queue.tickets)
            queue.changed.notify_all()  # takes effect when the lock is released; Ctrl-C cannot come between
            queue.waiting.append(_Job(tensors, step.scalars, priority, ticket, ready, done, abort))
        return ticket

    def drain(self, timeout_s: float | None = None) -> bool:
        queue = self._own()
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with queue.lock:
                self._raise_error()
                if queue.pending == 0:
                    return True
            if (left := until - time.monotonic()) <= 0:
                return False
            time.sleep(min(left, _DRAIN_S))

    def stats(self) -> WorkerStats:
        queue = self._own()
        with queue.lock:
            return WorkerStats(
                busy_s=queue.busy_s,
                elements=queue.elements,
                finished=queue.finished,
                abandoned=queue.abandoned,
                pending=queue.pending,
            )

    def close(self) -> int:
        self._queue.stop()
        if not self._queue.error_was_raised:
            self._raise_error()
        return self._queue.abandoned
