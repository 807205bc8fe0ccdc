"""Jobs with a part of a file: reads, and updates of states that lie in the file.

A thread of the pool runs such a job from beginning to end, in memory of its own: it reads the part, updates it, writes
``done``, writes the part back, and then writes ``written``. Other threads read, update and write other parts meanwhile.

Jobs start in the order of their priorities as their flags are reached. Two jobs on the same part are the caller's to
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

from ...core.errors import LaneError, SettingError
from ...core.notices import say_once
from .. import fallback, moves
from ..library import FileFailure, FilePart, FlagWord, Library, Scalars, Update, describe, library
from ..moves import Move
from ..update import FileTensors
from .c_worker import CPool, word
from .jobs import Engine, FlagValue, Request, Worker
from .python_worker import PythonThread


@dataclass(frozen=True, slots=True)
class Part:
    """``size`` bytes of an open file. ``unit``: what offsets and sizes of its accesses are multiples of."""

    number: int  # the descriptor
    offset: int
    size: int
    unit: int = 1


@dataclass(slots=True, eq=False, kw_only=True)
class FileJob(Request):
    """What is read, and what is updated there. It keeps all memory that it needs; ``keep`` too."""

    part: Part
    updates: Sequence[tuple[FileTensors, Scalars]] = ()
    target: torch.Tensor | None = None  # without updates: where to read to
    written: FlagValue | None = None
    keep: object = field(default=None, repr=False)

    def submit(self, c: ctypes.CDLL, pool: ctypes.c_void_p, ticket: int, words: Sequence[FlagWord]) -> int:
        part, updates = self.part, [tensors.bind(scalars) for tensors, scalars in self.updates]
        there = FilePart(
            fd=part.number,
            offset=part.offset,
            bytes=part.size,
            unit=part.unit,
            target=None if self.target is None else self.target.data_ptr(),
            written=word(self.written),
        )
        array = (Update * len(updates))(*updates)
        status = c.storm_pool_submit_file(pool, there, array, len(updates), ticket, self.priority, *words)
        return int(status)

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
        start_s, updating_s = time.perf_counter(), 0.0
        try:
            if not self._move(job, place, write=False) or not job.updates:
                return
            begin_s = time.perf_counter()
            for tensors, scalars in job.updates:
                there = tensors.inside(place)
                fallback.update_(there, scalars, 0, there.numel)
                self.elements += there.numel
            updating_s = time.perf_counter() - begin_s
            if job.done is not None:
                job.done.write()
            self._move(job, place, write=True)
        finally:
            self.busy_s += updating_s
            self.file_s += time.perf_counter() - start_s - updating_s

    def _move(self, job: FileJob, place: torch.Tensor, *, write: bool) -> bool:
        part, view = job.part, moves.memory_at(place.data_ptr(), job.part.size)
        move = self.write if write else self.read
        error, got = moves.move_all(move, part.number, view, part.offset, needed=part.size, unit=part.unit)
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
        return not error

    def failure(self) -> FileFailure:
        return self.failed


class FileWorker(Worker):
    """Runs jobs with files off the caller's thread, most urgent first."""

    _engine: FileEngine

    def run(self, job: FileJob) -> int:
        """Queue the job and return its ticket. Does not block. Raises as `Worker.submit`."""
        return self._own().add(job)

    def read(
        self,
        part: Part,
        target: torch.Tensor,
        *,
        priority: int,
        ready: FlagValue | None,
        also: FlagValue | None = None,
        done: FlagValue | None,
        abort: FlagValue | None,
        keep: object = None,
    ) -> int:
        """`run` a job that fills ``target``, contiguous bytes in RAM."""
        if target.nbytes != part.size or not target.is_contiguous() or target.device.type != "cpu":
            raise SettingError(f"Cannot read {part.size} bytes into {target.nbytes} on {target.device}.")
        job = FileJob(
            part=part, target=target, priority=priority, ready=ready, also=also, done=done, abort=abort, keep=keep
        )
        return self.run(job)

    def failure(self) -> FileFailure | None:
        """The first access that has failed, if one has: its errno, or ENODATA where no call moved more."""
        if os.getpid() != self._engine.pid:
            return None
        found = self._engine.failure()
        return found if found.error else None


def open_file_worker(
    threads: int, memory: torch.Tensor, *, read: Move = moves.read_at, write: Move = moves.write_at
) -> FileWorker:
    """Start a worker for jobs with files. ``memory``: bytes in RAM that its threads divide among them, each part at an
    address that the files' accesses need. ``read``, ``write``: a test puts others here, to make a disk fail."""
    if threads < 1 or memory.nbytes % threads:
        raise LaneError(f"{memory.nbytes} bytes cannot be divided among {threads} threads.")
    native = library()
    if native is None:
        say_once(describe())
        return FileWorker(PythonFileThread(memory=memory, read=read, write=write))
    return FileWorker(CFilePool(native, threads=threads, memory=memory, read=read, write=write))
