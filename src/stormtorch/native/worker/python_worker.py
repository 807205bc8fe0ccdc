"""The worker without the C library: one Python thread that runs the torch fallback. Same interface, same order, slower.

Torch's operations release the GIL and use their own threads, so a choice of threads and cores has no effect here.

Ctrl-C can end a call between any two of its operations, and the garbage collector can drop a worker on any thread, the
worker's own included. So one table holds the jobs, no counter beside it could disagree with it, and only the worker's
thread takes jobs out: other threads add a job, or ask it to stop. The thread sleeps in ``SimpleQueue.get``, which wakes
on a ``put`` from anywhere, and takes no lock that Ctrl-C could leave behind.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
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
_IDLE_S = 1.0  # between two checks without jobs: Ctrl-C may come between a job's arrival and the call that wakes


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

    def is_ready(self) -> bool:
        return self.begun or self.ready is None or self.ready.reached()

    def is_aborted(self) -> bool:
        return not self.begun and self.abort is not None and self.abort.reached()


class _Queue:
    """The jobs and the loop that runs them. Separate from the worker, which the thread must not keep alive.

    Made without its thread: the finalizer that ends it must exist before it starts, as Ctrl-C may come right after.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()  # guards everything below
        self.jobs: dict[int, _Job] = {}  # by ticket; a job remains here until it is over
        self.tickets = itertools.count(1)
        self.finished = self.abandoned = self.elements = 0
        self.busy_s = 0.0
        self.stopping = False
        self.error: BaseException | None = None
        self.error_was_raised = False
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._loop, name="storm-adam-0", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def _loop(self) -> None:
        try:
            while not (self.stopping and not self.jobs):
                if not self._run_chunk():
                    with contextlib.suppress(queue.Empty):
                        self.wake.get(timeout=_POLL_S if self.jobs else _IDLE_S)
        except BaseException as error:  # raised again, chained, on the thread that makes the next call
            with self.lock:
                self.error, self.stopping = error, True
                gone = self._abandon(list(self.jobs.values()))
            gone.clear()

    def _run_chunk(self) -> bool:
        """Run a chunk of the most urgent ready job; False if no job is ready."""
        job = self._choose()
        if job is None:
            return False
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
                self.finished += 1
                self._end(job)
        return True

    def _choose(self) -> _Job | None:
        """The most urgent ready job, begun from now on. Abandons those that are to be."""
        chosen = None
        with self.lock:
            gone: list[_Job] = []
            for job in sorted(self.jobs.values(), key=lambda job: (job.priority, job.ticket)):
                is_ready = job.is_ready()  # before the abort flag: see csrc/worker.c
                if job.is_aborted() or (self.stopping and not job.begun):
                    gone.append(job)
                elif is_ready and chosen is None:
                    chosen = job
            if chosen is not None:
                chosen.begun = True
            self._abandon(gone)
        gone.clear()  # after the lock: finalizers of their tensors may need it
        return chosen

    def _abandon(self, jobs: list[_Job]) -> list[_Job]:
        self.abandoned += len(jobs)
        for job in jobs:
            self._end(job)
        return jobs

    def _end(self, job: _Job) -> None:
        if job.done is not None:
            job.done.write()
        del self.jobs[job.ticket]

    def stop(self) -> None:
        if os.getpid() != self.pid:  # the thread remained in the parent
            return
        with self.lock:
            self.stopping = True
        self.wake.put(None)
        if threading.current_thread() is not self.thread and self.thread.is_alive():
            self.thread.join()  # not if the worker was collected on the thread itself: it then ends by itself


class ThreadWorker(Worker):
    """A Python thread instead of the native ones."""

    def __init__(self, *, threads: int) -> None:
        self.threads = threads
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
        work = self._queue
        if work.error is not None:
            work.error_was_raised = True
            raise LaneError(
                f"The optimizer's worker failed: {work.error!r}. {work.abandoned} jobs were abandoned; "
                "the tensors of the one that failed are partly updated."
            ) from work.error

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
        work = self._own()
        with work.lock:
            self._raise_error()
            if work.stopping:
                raise LaneError("Cannot submit to a worker that was closed. Open another one.")
            ticket = next(work.tickets)
            work.jobs[ticket] = _Job(tensors, step.scalars, priority, ticket, ready, done, abort)
        work.wake.put(None)
        return ticket

    def stats(self) -> WorkerStats:
        work = self._own()
        with work.lock:
            return WorkerStats(
                busy_s=work.busy_s,
                elements=work.elements,
                finished=work.finished,
                abandoned=work.abandoned,
                pending=len(work.jobs),
            )

    def close(self) -> int:
        self._queue.stop()
        if not self._queue.error_was_raised:
            self._raise_error()
        return self._queue.abandoned
