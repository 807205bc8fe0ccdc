"""The worker without the C library: one Python thread that runs the torch fallback. Same interface, same order, slower.

Torch's operations release the GIL and bring their own threads, so a choice of threads and cores has no effect here.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.errors import LaneError
from . import fallback
from .jobs import FlagValue, Worker, WorkerStats

if TYPE_CHECKING:
    from .adamw import AdamStep, AdamTensors
    from .library import Scalars

_POLL_S = 0.0002  # a Python thread that wakes more often takes the GIL from the one that launches


@dataclass(slots=True, eq=False)
class _Job:
    tensors: AdamTensors
    scalars: Scalars
    priority: int
    ticket: int
    ready: FlagValue | None
    done: FlagValue | None
    begun: bool = False
    next: int = 0  # elements already updated

    def __lt__(self, other: _Job) -> bool:
        return (self.priority, self.ticket) < (other.priority, other.ticket)


class _Queue:
    """The jobs and the loop that runs them. Apart from the worker, which the thread must not keep alive."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.changed = threading.Condition()  # its lock guards everything below
        self.waiting: list[_Job] = []
        self.ready: list[_Job] = []  # heap
        self.tickets = itertools.count(1)
        self.pending = self.finished = self.abandoned = self.elements = 0
        self.busy_s = 0.0
        self.stopping = False
        self.error: BaseException | None = None
        self.error_was_raised = False
        self.thread = threading.Thread(target=self._loop, name="storm-adam-0", daemon=True)
        self.thread.start()

    def _loop(self) -> None:
        try:
            while (job := self._take()) is not None:
                last = min(job.next + fallback.CHUNK, job.tensors.numel)
                start = time.perf_counter()
                fallback.update_(job.tensors, job.scalars, job.next, last)
                with self.changed:
                    self.busy_s += time.perf_counter() - start
                    self.elements += last - job.next
                    job.next = last
                    if last == job.tensors.numel:
                        self.ready.remove(job)
                        heapq.heapify(self.ready)
                        self.finished += 1
                        self._end(job)
                del job  # a sleeping thread must not keep the last tensors alive
        except BaseException as error:  # raised again, chained, on the thread that calls next
            with self.changed:
                self.error = error
                self._abandon(self.waiting + self.ready)

    def _take(self) -> _Job | None:
        """The most urgent ready job, left on the heap; blocks until there is one. None: the thread should end."""
        with self.changed:
            while True:
                self._look_at_flags()
                if self.ready:
                    self.ready[0].begun = True
                    return self.ready[0]
                if self.stopping:
                    return None
                self.changed.wait(_POLL_S if self.waiting else None)

    def _look_at_flags(self) -> None:
        still: list[_Job] = []
        for job in self.waiting:
            if job.ready is None or job.ready.reached():
                heapq.heappush(self.ready, job)
            else:
                still.append(job)
        self.waiting = still

    def _end(self, job: _Job) -> None:
        if job.done is not None:
            job.done.write()
        self.pending -= 1
        self.changed.notify_all()

    def _abandon(self, jobs: list[_Job]) -> None:
        self.stopping = True
        self.waiting = []
        self.ready = [job for job in self.ready if job not in jobs]
        self.abandoned += len(jobs)
        for job in jobs:
            self._end(job)
        self.changed.notify_all()

    def stop(self) -> None:
        if os.getpid() != self.pid:  # the thread stayed with the parent
            return
        with self.changed:
            self._abandon([job for job in self.waiting + self.ready if not job.begun])
        self.thread.join()


class ThreadWorker(Worker):
    """A Python thread in the place of the native ones."""

    def __init__(self, *, threads: int, cores: list[int]) -> None:
        self.threads, self.cores = threads, cores
        self._queue = _Queue()
        self._finalizer = weakref.finalize(self, self._queue.stop)

    def _own(self) -> _Queue:
        if os.getpid() != self._queue.pid:
            raise LaneError(
                f"This worker belongs to process {self._queue.pid}, and its thread did not follow the fork "
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
    ) -> int:
        queue = self._own()
        with queue.changed:
            self._raise_error()
            if queue.stopping:
                raise LaneError("Cannot submit to a worker that was closed. Open another one.")
            ticket = next(queue.tickets)
            queue.waiting.append(_Job(tensors, step.scalars, priority, ticket, ready, done))
            queue.pending += 1
            queue.changed.notify_all()
        return ticket

    def drain(self, timeout_s: float | None = None) -> bool:
        queue = self._own()
        with queue.changed:
            drained = queue.changed.wait_for(lambda: queue.pending == 0, timeout_s)
            self._raise_error()
        return drained

    def stats(self) -> WorkerStats:
        queue = self._own()
        with queue.changed:
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
