"""The worker without the C library: one Python thread that runs the torch fallback. Same interface, same order, slower.

Torch's operations release the GIL and bring their own threads, so a choice of threads and cores has no effect here.

Ctrl-C can end ``submit`` between any two of its operations, and the garbage collector can drop a worker on any thread,
the worker's own included. So there is no counter beside the lists that it could disagree with, and only the worker's
thread takes jobs off them: all others add a job, or ask it to stop.
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

from ..core.errors import LaneError
from . import fallback
from .jobs import FlagValue, Worker, WorkerStats
from .library import Scalars
from .update import AdamStep, AdamTensors

_POLL_S = 0.0002  # a Python thread that wakes more often takes the GIL from the one that launches
_SLICE_S = 0.2  # longest sleep at once of a caller: a Ctrl-C just before it would go unnoticed until its end


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

    def __lt__(self, other: _Job) -> bool:
        return (self.priority, self.ticket) < (other.priority, other.ticket)

    def is_ready(self) -> bool:
        return self.ready is None or self.ready.reached()

    def is_aborted(self) -> bool:
        return self.abort is not None and self.abort.reached()


class _Queue:
    """The jobs and the loop that runs them. Apart from the worker, which the thread must not keep alive."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.changed = threading.Condition()  # its lock guards everything below
        self.waiting: list[_Job] = []
        self.ready: list[_Job] = []  # heap; a job stays here until it is over
        self.tickets = itertools.count(1)
        self.finished = self.abandoned = self.elements = 0
        self.busy_s = 0.0
        self.stopping = False
        self.error: BaseException | None = None
        self.error_was_raised = False
        self.thread = threading.Thread(target=self._loop, name="storm-adam-0", daemon=True)
        self.thread.start()

    @property
    def pending(self) -> int:
        return len(self.waiting) + len(self.ready)

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
                        self.finished += 1
                        self._end([job])
                del job  # a sleeping thread must not keep the last tensors alive
        except BaseException as error:  # raised again, chained, on the thread that calls next
            with self.changed:
                self.error, self.stopping = error, True
                gone = self.waiting + self.ready
                self.abandoned += len(gone)
                self._end(gone)

    def _take(self) -> _Job | None:
        """The most urgent ready job, left on the heap; blocks until there is one. None: the thread should end."""
        while True:
            with self.changed:
                gone = self._look_at_flags()
                if self.ready:
                    self.ready[0].begun = True
                    return self.ready[0]
                if self.stopping:
                    return None
                if not gone:
                    self.changed.wait(_POLL_S if self.waiting else None)
            gone.clear()  # after the lock: what hangs on their tensors may need it

    def _look_at_flags(self) -> list[_Job]:
        """Sorts out what is ready, and returns what was abandoned. Abort flags come last; csrc/worker.c says why."""
        for job in [job for job in self.waiting if job.is_ready()]:
            self.waiting.remove(job)
            heapq.heappush(self.ready, job)
        gone = [job for job in self.waiting + self.ready if not job.begun and (self.stopping or job.is_aborted())]
        self.abandoned += len(gone)
        self._end(gone)
        return gone

    def _end(self, jobs: list[_Job]) -> None:
        if jobs:
            for job in jobs:
                if job.done is not None:
                    job.done.write()
                (self.ready if job in self.ready else self.waiting).remove(job)
            heapq.heapify(self.ready)
            self.changed.notify_all()

    def stop(self) -> None:
        if os.getpid() != self.pid:  # the thread stayed with the parent
            return
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        if threading.current_thread() is not self.thread:  # where the worker was collected there: it ends by itself
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
        abort: FlagValue | None = None,
    ) -> int:
        queue = self._own()
        with queue.changed:
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
        with queue.changed:
            while queue.pending > 0 and (left := until - time.monotonic()) > 0:
                queue.changed.wait(min(left, _SLICE_S))
            self._raise_error()
            return queue.pending == 0

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
