"""Notes who uses which memory in which order, and what nothing orders. happens_before.py tells it of all work."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import stormtorch
from stormtorch.memory.host.region import Region
from stormtorch.memory.lanes.waits import WaitMeter
from stormtorch.native.update import AdamTensors, WeightCopy
from stormtorch.native.worker.files import FileJob
from stormtorch.native.worker.jobs import FlagValue

from .ordering import HOST, Access, Clocks, Memory, Point

COMPUTE = "compute"
_SOURCE = str(Path(stormtorch.__file__).parent) + "/"
_LINES, _CALLERS = 5, 4  # of our code, that are kept of an access and looked at for a wait
_FILES = 64  # bits, beyond which an address says which file it is in
_DEPTH = 24  # of all frames that are looked at: this is done for every access


class Wait:
    """A wait in the code under test: whose, and which functions ask for it, the innermost first."""

    def __init__(self, actor: str, *callers: str) -> None:
        self.actor, self.callers = actor, list(callers)


class Race(NamedTuple):
    """Two accesses, in the order in which the host asked for them."""

    first: str
    second: str

    def __str__(self) -> str:
        return f"nothing orders\n    {self.first}\n    {self.second}"


class Checker:
    """Notes accesses and orders; ``races`` are those of the same two lines once each."""

    def __init__(self, missing: Wait | None = None) -> None:
        """``missing``: a wait that is not heard of, as if the code under test did not have it."""
        self.clocks, self._memory = Clocks(), Memory()
        self.missing, self.missed = missing, 0  # how often
        self.accesses = 0
        self._races: dict[tuple[str, str], Race] = {}
        self._flags: defaultdict[int, list[tuple[int, Point]]] = defaultdict(list)  # by address: values, and when
        self._homes: list[tuple[int, int, Region]] = []  # kept, so that nothing else comes to lie there
        self._jobs = 0
        self._thread, self._lock = threading.get_ident(), threading.RLock()

    @property
    def races(self) -> list[Race]:
        return list(self._races.values())

    def check(self) -> None:
        """Raise if there are races, or if nothing was looked at."""
        assert self.accesses, "nothing was looked at"
        assert not self._races, "\n".join(map(str, self.races))

    # --- memory

    def add_home(self, region: Region) -> None:
        self._homes.append((region.address, region.address + region.size, region))

    def is_home(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        return any(start <= address < stop for start, stop, _ in self._homes)

    def use(self, actor: str, tensor: torch.Tensor, what: str, *, writes: bool) -> None:
        """Note that ``actor`` was asked to use a tensor."""
        if not tensor.numel():
            return
        start = tensor.data_ptr()
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self._use(actor, start, start + (last + 1) * tensor.itemsize, what, writes=writes)

    def use_file(self, actor: str, number: int, offset: int, size: int, *, writes: bool) -> None:
        """Note that ``actor`` was asked to use bytes of an open file."""
        start = (os.fstat(number).st_ino << _FILES) + offset  # beyond all addresses of memory
        self._use(actor, start, start + size, "in a file", writes=writes)

    def _use(self, actor: str, start: int, stop: int, what: str, *, writes: bool) -> None:
        with self._lock:
            self.accesses += 1
            clock = self.clocks.ask(actor)
            access = Access(actor, clock[actor], writes, what, _frames(_LINES))
            for earlier in self._memory.use(start, stop, access, clock):
                race = Race(*(_told(each) for each in (earlier, access)))
                self._races.setdefault((race.first.partition(", ")[0], race.second.partition(", ")[0]), race)

    def operate(self, what: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """Note an operation that the calling thread asks for. The host does what is in its memory itself, at once."""
        for tensors, are_written in ((reads, False), (writes, True)):
            for tensor in tensors:
                self.use(HOST if self.is_home(tensor) else COMPUTE, tensor, what, writes=are_written)

    def save(self, tensor: torch.Tensor) -> None:
        """Note that a thread of a save is reading: it tells before and after."""
        if self.is_home(tensor):
            self.use(HOST, tensor, "for a save", writes=False)

    # --- order

    def see(self, actor: str, point: Point) -> None:
        """Note that ``actor`` waits for ``point``."""
        with self._lock:
            callers = [code.co_qualname for code, _ in _frames(_CALLERS) if code is not WaitMeter.wait.__code__]
            missing = self.missing
            if missing is not None and missing.actor in actor and callers[: len(missing.callers)] == missing.callers:
                self.missed += 1
            else:
                self.clocks.see(actor, point)

    def set_flag(self, address: int, value: int, point: Point) -> None:
        self._flags[address].append((value, point))

    def flag(self, address: int, value: int) -> Point | None:
        """When the flag reaches ``value``; None: it has it from the beginning."""
        if value <= 0:
            return None
        found = next((point for reached, point in self._flags[address] if reached >= value), None)
        assert found is not None, "a wait for a flag value that no lane or job was asked to write"
        return found

    def see_flag(self, actor: str, address: int, value: int) -> None:
        with self._lock:
            point = self.flag(address, value)
            if point is not None:
                self.see(actor, point)

    def host_sees(self, point: Point) -> None:
        """Note that the calling thread has waited for ``point``, if it is the one that asks for work."""
        if threading.get_ident() == self._thread:
            self.see(HOST, point)

    # --- updates

    def job(
        self,
        tensors: AdamTensors | WeightCopy,
        ready: FlagValue | None,
        done: FlagValue | None,
        also: FlagValue | None = None,
    ) -> None:
        """Note a job of the worker: an actor of its own, because jobs overtake each other."""
        with self._lock:
            self._jobs += 1
            actor = f"job {self._jobs}"
            self.clocks.ask(actor)
            for flag in (ready, also):
                if flag is not None:
                    self.see_flag(actor, flag.address, flag.value)
            read, written = _of(tensors)
            for tensor in read:
                self.use(actor, tensor, "for an update", writes=False)
            for tensor in written:
                self.use(actor, tensor, "in an update", writes=True)
            if done is not None:
                self.set_flag(done.address, done.value, self.clocks.point(actor))

    def file_job(self, job: FileJob) -> None:
        """Note an update of states in a file, by two actors: one uses memory, one the file."""
        with self._lock:
            self._jobs += 1
            actor, file = f"job {self._jobs}", f"file {self._jobs}"
            self._begin_job(actor, file, job)
            for tensors, _ in job.updates:
                for tensor in (tensors.grad, tensors.grad_factor):
                    if tensor is not None:
                        self.use(actor, tensor, "for an update", writes=False)
                if isinstance(tensors.weight, torch.Tensor):
                    self.use(actor, tensors.weight, "in an update", writes=True)
            if job.done is not None:
                self.set_flag(job.done.address, job.done.value, self.clocks.point(actor))
            self.clocks.see(file, self.clocks.point(actor))
            for range_ in job.ranges:
                self.use_file(file, range_.number, range_.offset, range_.size, writes=True)
            if job.written is not None:
                self.set_flag(job.written.address, job.written.value, self.clocks.point(file))

    def _begin_job(self, actor: str, file: str, job: FileJob) -> None:
        """``actor`` waits for ``ready``, ``file`` for ``also``, and the ranges are read."""
        for one, flag in ((actor, job.ready), (file, job.also)):
            self.clocks.ask(one)
            if flag is not None:
                self.see_flag(one, flag.address, flag.value)
        for range_ in job.ranges:
            self.use_file(file, range_.number, range_.offset, range_.size, writes=False)
        self.clocks.see(actor, self.clocks.point(file))

    def read(self, target: torch.Tensor, job: FileJob) -> None:
        """Note a read of a file, by a thread of a worker: ``ready`` is for the memory, ``also`` for the file."""
        with self._lock:
            self._jobs += 1
            actor, file = f"read {self._jobs}", f"file {self._jobs}"
            self._begin_job(actor, file, job)
            self.use(actor, target, "from a file", writes=True)
            if job.done is not None:
                self.set_flag(job.done.address, job.done.value, self.clocks.point(actor))

    def update(self, tensors: AdamTensors) -> None:
        """Note an update by the calling thread, on the device or at home."""
        self.operate("in an update", *_of(tensors))


def _of(tensors: AdamTensors | WeightCopy) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What an update reads, and what it writes."""
    if isinstance(tensors, WeightCopy):
        return [tensors.source], [tensors.weight]
    written = (tensors.weight, tensors.master, tensors.exp_avg, tensors.exp_avg_sq)
    read = [tensors.grad, tensors.grad_factor, *(_of(tensors.source)[1] if tensors.source is not None else ())]
    return [tensor for tensor in read if tensor is not None], [tensor for tensor in written if tensor is not None]


def _frames(most: int) -> list[tuple[CodeType, int]]:
    """The innermost functions of our code that are running, and their lines."""
    found, left = list[tuple[CodeType, int]](), _DEPTH
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and left and len(found) < most:
        if _is_ours(frame.f_code):
            found.append((frame.f_code, frame.f_lineno))
        frame, left = frame.f_back, left - 1
    return found


@functools.cache
def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_SOURCE) and "/bridge/" not in code.co_filename


def _told(access: Access) -> str:
    where: Any = access.where  # of `_frames`
    lines = (f"{code.co_filename.removeprefix(_SOURCE)}:{line} {code.co_qualname}" for code, line in where)
    return f"{access.actor} {'writes' if access.writes else 'reads'} {access.what}, from " + ", ".join(lines)
