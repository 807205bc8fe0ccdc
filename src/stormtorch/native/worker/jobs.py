"""The interface of workers: they take updates, wait for the gradients, and signal when the updates are done."""

from __future__ import annotations

import abc
import ctypes
import itertools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...core.endings import Closing
from ...core.errors import LaneError, SettingError
from ...core.events import Sink, Span, What
from ...core.tags import Tag
from .. import flag_words
from ..library import FlagWord, Scalars
from ..update import AdamStep, AdamTensors, WeightCopy


@dataclass(frozen=True, slots=True)
class FlagValue:
    """The address of a 32-bit flag word, and the value it must reach.

    Reached means ``(int32)(word - value) >= 0``, the cyclic rule of ``cuStreamWaitValue32`` with GEQ: counters may
    wrap, as long as they are never 2^31 apart.

    ``owner`` keeps the word's memory; a worker holds it until the job is over. Without one, the caller must keep it."""

    address: int
    value: int
    owner: object = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.address <= 0 or self.address % 4:
            raise SettingError(
                f"address={self.address} is not that of a 32-bit word. Accepted: a positive multiple of 4."
            )

    def reached(self) -> bool:
        return flag_words.has_reached(flag_words.load(self.address), self.value)

    def write(self) -> None:
        """Raise the word to the value, unless it is further already."""
        flag_words.store(self.address, self.value)


@dataclass(frozen=True, kw_only=True)
class WorkerStats:
    """Counted since the worker was opened. ``busy_s`` adds up all threads, so its limit is threads × time. ``file_s``:
    the time in which at least one thread was reading or writing a file."""

    busy_s: float
    elements: int
    finished: int
    abandoned: int
    pending: int
    file_s: float
    read_bytes: int
    written_bytes: int


@dataclass(slots=True, eq=False, kw_only=True)
class Request(abc.ABC):
    """Work for a worker: how urgent it is, what it waits for and what it signals."""

    priority: int
    ready: FlagValue | None
    also: FlagValue | None  # a second one to wait for
    done: FlagValue | None
    abort: FlagValue | None
    dropped: set[int] | None = None  # gets the ticket if the job is abandoned

    @property
    def is_ready(self) -> bool:
        return all(flag is None or flag.reached() for flag in (self.ready, self.also))

    @abc.abstractmethod
    def submit(self, c: ctypes.CDLL, pool: ctypes.c_void_p, ticket: int, words: Sequence[FlagWord]) -> int:
        """Queue it in the C library's ``pool``; returns a negative errno if that refuses it."""

    def signal(self) -> None:
        """Say that it is over."""
        if self.done is not None:
            self.done.write()


@dataclass(slots=True, eq=False, kw_only=True)
class Job(Request):
    """One update or copy. It keeps all memory that it needs."""

    tensors: AdamTensors | WeightCopy
    scalars: Scalars

    def submit(self, c: ctypes.CDLL, pool: ctypes.c_void_p, ticket: int, words: Sequence[FlagWord]) -> int:
        tensors = self.tensors
        update = tensors.bind() if isinstance(tensors, WeightCopy) else tensors.bind(self.scalars)
        return int(c.storm_pool_submit(pool, update, ticket, self.priority, *words))


class Engine(abc.ABC):
    """Runs the jobs of a worker. Separate from the worker, which the engine's threads must not keep alive.

    Made without threads: the finalizer that ends them must exist before they start, as Ctrl-C may come right after."""

    def __init__(self, threads: int) -> None:
        self.threads, self.pid = threads, os.getpid()
        self.tickets = itertools.count(1)

    @abc.abstractmethod
    def start(self) -> None:
        """Start the threads."""

    @abc.abstractmethod
    def add(self, job: Request) -> int:
        """Queue the job and return its ticket."""

    @abc.abstractmethod
    def stats(self) -> WorkerStats:
        """Statistics so far, also after ``stop``."""

    @abc.abstractmethod
    def stop(self) -> int:
        """End the threads and return how many jobs were abandoned; may raise an error that no caller has seen."""

    @abc.abstractmethod
    def end(self) -> None:
        """End the threads when the worker was collected, or the interpreter exits."""


class Worker(Closing):
    """Updates tensors off the caller's thread, most urgent first.

    A job is *waiting* until its ready flag is reached, then *ready*: it competes by (priority, order of submission),
    lowest first. In the C library one that becomes ready overtakes a less urgent one between two chunks. It is *over*
    when its done flag is written, which happens for every accepted job: after it was finished, or when it was
    abandoned.

    A job that has begun is always finished. One that has not begun is abandoned by ``close``, and when its abort flag
    is reached, whether or not its ready flag ever is. Code that aborts must write the abort flag before it lets ready
    flags be reached without gradients; then no such gradient is ever used."""

    def __init__(self, engine: Engine) -> None:
        self.threads, self._engine = engine.threads, engine
        self._finalizer = weakref.finalize(self, engine.end)
        engine.start()

    def _own(self) -> Engine:
        """The engine. Raises in a forked child, which does not have the threads of its parent's worker."""
        if os.getpid() != self._engine.pid:
            raise LaneError(
                f"This worker belongs to process {self._engine.pid}; its threads do not exist after the fork into "
                f"{os.getpid()}. Open another one there."
            )
        return self._engine

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
        """Queue one update and return its ticket, counted from 1. Does not block.

        The memory of the tensors, ``grad_factor`` included, is read only after the ready flag was reached. The tensors
        and the owners of the flags are kept alive until the job is over and a later call on the worker notices it.
        Raises LaneError when the worker is closed, has failed, or belongs to the process this one was forked from.
        Ctrl-C during the call leaves the job either queued or not; the worker remains usable."""
        if tensors.device.type != "cpu":
            raise SettingError(
                f"A worker cannot update tensors on {tensors.device}. Accepted: CPU tensors; adamw_ takes those of a "
                "GPU."
            )
        if not isinstance(priority, int) or not -(1 << 31) <= priority < 1 << 31:
            raise SettingError(f"priority={priority!r} is not valid. Accepted: a whole number of 32 bits.")
        return self._own().add(
            Job(
                tensors=tensors,
                scalars=step.scalars,
                priority=priority,
                ready=ready,
                also=None,
                done=done,
                abort=abort,
            )
        )

    def copy(
        self,
        copy: WeightCopy,
        *,
        priority: int,
        ready: FlagValue | None,
        also: FlagValue | None,
        done: FlagValue | None,
        abort: FlagValue | None = None,
        dropped: set[int] | None = None,
    ) -> int:
        """As `submit`, for a copy, which waits for two flags. ``dropped`` gets its ticket if it is abandoned; all have
        got there when `close` returns."""
        return self._own().add(
            Job(
                tensors=copy,
                scalars=Scalars(),
                priority=priority,
                ready=ready,
                also=also,
                done=done,
                abort=abort,
                dropped=dropped,
            )
        )

    def stats(self) -> WorkerStats:
        """Statistics so far. Readable after ``close`` too."""
        return self._own().stats()

    def close(self) -> int:
        """End the threads and return how many jobs were abandoned in all. May be called again. Jobs that have not begun
        are abandoned. Wait for their done flags first to keep them."""
        return self._engine.stop()


def closed() -> LaneError:
    return LaneError("Cannot submit to a worker that was closed. Open another one.")


class UpdateMeter:
    """Reports how long a worker's threads have updated. Thread-safe."""

    def __init__(self, worker: Worker, sink: Sink) -> None:
        self._worker, self._sink = worker, sink
        self._lock = threading.RLock()
        self._emitted = time.perf_counter(), 0.0  # when, and the worker's seconds until then

    def emit(self) -> None:
        """Report the time since the last call. Readable after the worker was closed too."""
        with self._lock:
            (before_s, busy_before_s), now_s = self._emitted, time.perf_counter()
            busy_s = self._worker.stats().busy_s
            if now_s > before_s:
                self._emitted = now_s, busy_s
                share = (busy_s - busy_before_s) / self._worker.threads / (now_s - before_s)
                self._sink(Span(What.UPDATE, before_s, now_s, share=share))


class FileMeter:
    """Reports what a worker has read and written, and for which part of the time. Thread-safe."""

    def __init__(self, worker: Worker, sink: Sink, tag: Tag) -> None:
        self._worker, self._sink, self._tag = worker, sink, tag
        self._lock = threading.RLock()
        self._emitted, self._before = time.perf_counter(), worker.stats()

    def emit(self) -> None:
        """Report the time since the last call. Readable after the worker was closed too."""
        with self._lock:
            (before_s, before), now_s = (self._emitted, self._before), time.perf_counter()
            stats = self._worker.stats()
            self._emitted, self._before = now_s, stats
            share = min(1.0, (stats.file_s - before.file_s) / max(now_s - before_s, 1e-9))
            for what, size in (
                (What.READ, stats.read_bytes - before.read_bytes),
                (What.WRITE, stats.written_bytes - before.written_bytes),
            ):
                if size:  # the time is that of both
                    self._sink(Span(what, before_s, now_s, "disk", self._tag, size, share=share))
