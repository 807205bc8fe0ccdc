"""Jobs with files: reads, and updates of states that lie there, perhaps with their weights.

A thread of the pool runs such a job from beginning to end, in memory of its own: it reads the job's ranges, updates
them, writes ``done``, writes the ranges back, and then writes ``written``. Other threads work on other ranges
meanwhile.

Jobs start in the order of their priorities as their flags are reached. Two jobs on the same range are the caller's to
order: the second one waits for ``written`` of the first.

An access that fails writes the abort word before any other flag, so that no job uses what is not there. `failure` then
says what it was; the worker goes on with jobs that name another abort word."""

from __future__ import annotations

import abc
import ctypes
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...core.errors import LaneError
from ...core.notices import say_once
from .. import fallback, moves
from ..library import (
    FILE_RANGES,
    FileFailure,
    FilePart,
    FileRange,
    FlagWord,
    Library,
    Scalars,
    Update,
    describe,
    library,
)
from ..moves import Move
from ..update import FileTensors
from .c_worker import CPool, word
from .jobs import Engine, FlagValue, Request, Worker
from .python_worker import PythonThread


@dataclass(frozen=True, slots=True)
class Range:
    """``size`` bytes of an open file from ``offset`` on, and where they begin in the memory of a job."""

    number: int  # the descriptor
    offset: int
    size: int
    at: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class FileJob(Request):
    """What is read, and what is updated there. It keeps all memory that it needs; ``keep`` too."""

    ranges: Sequence[Range]  # at most FILE_RANGES, each of at least one byte
    unit: int = 1  # what offsets and sizes of accesses are multiples of
    updates: Sequence[tuple[FileTensors, Scalars]] = ()  # the weights of all of them are in files, or of none
    target: torch.Tensor | None = None  # without updates: where to read to
    written: FlagValue | None = None
    keep: object = field(default=None, repr=False)

    def submit(self, c: ctypes.CDLL, pool: ctypes.c_void_p, ticket: int, words: Sequence[FlagWord]) -> int:
        updates = [tensors.bind(scalars) for tensors, scalars in self.updates]
        ranges = [FileRange(r.number, r.offset, r.size, r.at) for r in self.ranges]
        part = FilePart(
            ranges=(FileRange * FILE_RANGES)(*ranges),
            unit=self.unit,
            has_weights=any(tensors.has_weights for tensors, _ in self.updates),
            target=None if self.target is None else self.target.data_ptr(),
            written=word(self.written),
        )
        array = (Update * len(updates))(*updates)
        return int(c.storm_pool_submit_file(pool, part, array, len(updates), ticket, self.priority, *words))

    def signal(self) -> None:
        Request.signal(self)
        if self.written is not None:
            self.written.write()


class FileEngine(Engine):
    """An engine that runs jobs with files."""

    @abc.abstractmethod
    def failure(self) -> FileFailure:
        """The first access that has failed; its ``error`` is 0 if none has."""


class CFilePool(CPool, FileEngine):
    """The C pool, with memory for its threads."""

    def __init__(self, library: Library, *, threads: int, memory: torch.Tensor, read: Move, write: Move) -> None:
        super().__init__(library, threads=threads, cores=[])
        self.memory, self.moves = memory, (read, write)
        self.in_c: tuple[object, object] | None = None

    def start(self) -> None:
        super().start()
        self.c.storm_pool_lend(self.pointer, self.memory.data_ptr(), self.memory.nbytes // self.threads)
        if self.moves != (moves.read_at, moves.write_at):
            self.in_c = moves.in_c(self.moves[0]), moves.in_c(self.moves[1])  # kept as long as C may call them
            self.c.storm_pool_replace(self.pointer, *self.in_c)

    def failure(self) -> FileFailure:
        found = FileFailure()
        with self.lock:
            if self.pointer:
                self.c.storm_pool_read_failure(self.pointer, ctypes.byref(found))
        return found


class PythonFileThread(PythonThread, FileEngine):
    """One Python thread, for machines without the C library."""

    def __init__(self, *, memory: torch.Tensor, read: Move, write: Move) -> None:
        super().__init__(threads=1)
        self.memory, self.read, self.write = memory, read, write
        self.failed = FileFailure()

    def run(self, job: Request) -> None:
        assert isinstance(job, FileJob)
        place = job.target if job.target is not None else self.memory
        if not self._move(job, place, write=False) or not job.updates:
            return
        begin_s = time.perf_counter()
        for tensors, scalars in job.updates:
            there = tensors.inside(place)
            fallback.update_(there, scalars, 0, there.numel)
            self.elements += there.numel
        self.busy_s += time.perf_counter() - begin_s
        if job.done is not None:
            job.done.write()
        self._move(job, place, write=True)

    def _move(self, job: FileJob, place: torch.Tensor, *, write: bool) -> bool:
        start_s, move = time.perf_counter(), self.write if write else self.read
        error = 0
        for part in job.ranges:
            view = moves.memory_at(place.data_ptr() + part.at, part.size)
            error, got = moves.move_all(move, part.number, view, part.offset, needed=part.size, unit=job.unit)
            if write:
                self.written_bytes += got
            else:
                self.read_bytes += got
            if error:
                if not job.updates:
                    place.fill_(0xFF)  # NaN: what uses these bytes anyway shows it
                if not self.failed.error:
                    self.failed = FileFailure(error, part.number, part.offset, part.size, got, write)
                if job.abort is not None:
                    job.abort.write()
                break
        self.file_s += time.perf_counter() - start_s
        return not error

    def failure(self) -> FileFailure:
        return self.failed


class FileWorker(Worker):
    """Runs jobs with files off the caller's thread, most urgent first."""

    _engine: FileEngine

    def run(self, job: FileJob) -> int:
        """Queue the job and return its ticket. Does not block. Raises as `Worker.submit`."""
        return self._own().add(job)

    def failure(self) -> FileFailure | None:
        """The first access that has failed, if one has: its errno, or ENODATA where no call moved more."""
        if os.getpid() != self._engine.pid:
            return None
        found = self._engine.failure()
        return found if found.error else None


def open_file_worker(
    threads: int, memory: torch.Tensor, *, read: Move = moves.read_at, write: Move = moves.write_at
) -> FileWorker:
    """Start a worker for jobs with files. ``memory``: bytes in RAM that its threads divide among them, each at an
    address that the files' accesses need. ``read``, ``write``: a test puts others here, to make a disk fail."""
    if threads < 1 or memory.nbytes % threads:
        raise LaneError(f"{memory.nbytes} bytes cannot be divided among {threads} threads.")
    native = library()
    if native is None:
        say_once(describe())
        return FileWorker(PythonFileThread(memory=memory, read=read, write=write))
    return FileWorker(CFilePool(native, threads=threads, memory=memory, read=read, write=write))
