"""The worker without the C library: one Python thread that runs the torch fallback. Same interface, slower, and a job
that has begun is not overtaken.

Torch's operations release the GIL and use their own threads, so a choice of threads and cores has no effect here.

Ctrl-C can end a call between any two of its operations, and the garbage collector can drop a worker on any thread, the
worker's own included. So one table holds the jobs, no counter beside it could disagree with it, and only the worker's
thread takes jobs out: other threads add a job, or ask it to stop. The thread sleeps in ``SimpleQueue.get``, which wakes
on a ``put`` from anywhere, and takes no lock that Ctrl-C could leave behind.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time

import torch

from ...core.errors import LaneError
from .. import fallback
from ..update import WeightCopy
from .jobs import Engine, Job, Request, WorkerStats, closed

_POLL_S = 0.0002  # a Python thread that wakes more often takes the GIL from the thread that launches
_IDLE_S = 1.0  # between two checks without jobs: Ctrl-C may come between a job's arrival and the call that wakes


class PythonThread(Engine):
    """The jobs and the loop that runs them."""

    def __init__(self, *, threads: int) -> None:
        super().__init__(threads)
        self.jobs: dict[int, Request] = {}  # by ticket; a job remains here until it is over
        self.finished = self.abandoned = self.elements = 0
        self.read_bytes = self.written_bytes = 0
        self.busy_s = self.file_s = 0.0
        self.lock, self.stopping = threading.RLock(), False  # nothing is added once it is stopping
        self.error: BaseException | None = None
        self.error_was_raised = False
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._loop, name="storm-adam-0", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def _loop(self) -> None:
        try:
            while not (self.stopping and not self.jobs):
                if not self._run_one():
                    with contextlib.suppress(queue.Empty):
                        self.wake.get(timeout=_POLL_S if self.jobs else _IDLE_S)
        except BaseException as error:  # raised again, chained, on the thread that makes the next call
            with self.lock:
                self.error, self.stopping = error, True
            for ticket in list(self.jobs):
                self._end(ticket, finished=False)

    def _run_one(self) -> bool:
        """Run the most urgent ready job; False if no job is ready."""
        for ticket, job in sorted(self.jobs.copy().items(), key=lambda item: (item[1].priority, item[0])):
            is_ready = job.is_ready  # before the abort flag: see csrc/worker.c
            if self.stopping or (job.abort is not None and job.abort.reached()):
                self._end(ticket, finished=False)
            elif is_ready:
                self.run(job)
                self._end(ticket, finished=True)
                return True
        return False

    def run(self, job: Request) -> None:
        assert isinstance(job, Job)
        if isinstance(job.tensors, WeightCopy):
            with torch.inference_mode():
                job.tensors.weight.copy_(job.tensors.source)
            return
        scale = fallback.read_scale(job.tensors, job.scalars)  # not earlier: it is written before the ready flag
        for first in range(0, job.tensors.numel, fallback.CHUNK):
            last, start_s = min(first + fallback.CHUNK, job.tensors.numel), time.perf_counter()
            fallback.update_(job.tensors, job.scalars, first, last, scale)
            self.busy_s += time.perf_counter() - start_s
            self.elements += last - first

    def _end(self, ticket: int, *, finished: bool) -> None:
        job = self.jobs[ticket]
        if not finished and job.dropped is not None:
            job.dropped.add(ticket)
        job.signal()
        self.finished += finished
        self.abandoned += not finished
        del self.jobs[ticket]

    def add(self, job: Request) -> int:
        with self.lock:
            self._raise_error()
            if self.stopping:
                raise closed()
            ticket = next(self.tickets)
            self.jobs[ticket] = job
        self.wake.put(None)
        return ticket

    def _raise_error(self) -> None:
        if self.error is not None:
            self.error_was_raised = True
            raise LaneError(
                f"The optimizer's worker failed: {self.error!r}. {self.abandoned} jobs were abandoned; "
                "the tensors of the one that failed are partly updated."
            ) from self.error

    def stats(self) -> WorkerStats:
        pending = len(self.jobs)  # first: a job is counted before it leaves the table
        names = ("busy_s", "elements", "finished", "abandoned", "file_s", "read_bytes", "written_bytes")
        counts = {name: getattr(self, name) for name in names}
        return WorkerStats(pending=pending, **counts)

    def stop(self) -> int:
        self.end()
        if not self.error_was_raised:
            self._raise_error()
        return self.abandoned

    def end(self) -> None:
        if os.getpid() != self.pid:  # the thread remained in the parent
            return
        with self.lock:
            self.stopping = True
        self.wake.put(None)
        if threading.current_thread() is not self.thread and self.thread.is_alive():
            self.thread.join()  # not if the worker was collected on the thread itself: it then ends by itself
