"""Loads weights from files, through a small ring of page-locked RAM: frozen ones from the model's own files, trained
ones from scratch files (in_scratch.py).

A unit's bytes are read slot by slot: direct I/O takes whole blocks, so a read covers the tensors that are neighbours
in the file, and the load lane copies from the slot to each one's place in the device copy. A slot has two flags.
``loaded`` is written by the thread that has read, and the lane waits for it; ``released`` is written by the lane behind
its copies, and the slot's next read waits for it. The host asks for the reads and enqueues the rest; it waits for none
of this. A read of trained weights also waits until their last update is in the file.

A read that fails, and a file that was changed, are errors: `Files.check` raises them before results are used."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from ...core.errors import StorageError, StormError
from ...core.events import Sink
from ...core.sizes import KiB, round_down, round_up
from ...core.tags import Tag
from ...memory.disk.calls import storage_error
from ...memory.disk.files import File
from ...memory.disk.mapped import WeightFile
from ...memory.lanes.flags import Flag
from ...memory.lanes.lane import Lane
from ...native.worker.files import FileJob, FileWorker, Range
from ...native.worker.jobs import FileMeter
from ..bridge.torch_private import without_torch_function
from ..units.unit import Place, Unit
from .in_scratch import ScratchWeights, Written

_GAP = 64 * KiB  # bytes between two tensors that are read with them, because another read would take longer


class Source(Protocol):
    """A file of weights."""

    @property
    def path(self) -> Path:
        """For errors."""

    @property
    def direct(self) -> File:
        """For reads of whole blocks."""

    @property
    def plain(self) -> File:
        """For the rest."""

    @property
    def whole_bytes(self) -> int:
        """The part from the start that direct reads can read."""

    def check(self, *, content: bool = False) -> None:
        """Raise if others have changed it."""


class Copy(NamedTuple):
    """Bytes of a slot, and where they belong in the unit's image."""

    source: int
    target: int
    size: int


class Read(NamedTuple):
    """One read: at most a slot."""

    range: Range
    unit: int  # what offsets and sizes of accesses are multiples of
    copies: list[Copy]
    after: Written | None  # updates of these bytes


class _Tensor(NamedTuple):
    """Bytes of a file, and where they belong in the unit's image. ``after``: updates of them."""

    file: Source
    offset: int
    size: int
    target: int
    after: Written | None = None


class Slot:
    """A part of the ring; ``uses`` counts its reads."""

    __slots__ = ("bytes", "loaded", "released", "uses")

    def __init__(self, memory: torch.Tensor, loaded: Flag, released: Flag) -> None:
        self.bytes, self.loaded, self.released, self.uses = memory, loaded, released, 0


class Files:
    """The files of a model, and the ring through which its units' weights come."""

    def __init__(
        self,
        units: Sequence[Unit],
        open_file: Callable[[Place], WeightFile],
        scratch: ScratchWeights | None,
        *,
        ring: torch.Tensor,
        slot_bytes: int,
        flags: Sequence[Flag],
        worker: FileWorker,
        sink: Sink,
    ) -> None:
        """``units``: those that have weights in files; ``open_file`` gives the file of a frozen one, ``scratch`` has
        trained ones. ``flags``: two for each slot of ``ring``, whose memory starts at a page."""
        self._worker, self._slot_bytes, self._next = worker, slot_bytes, 0
        self._meter = FileMeter(worker, sink, Tag.PARAMETERS)
        parts, pairs = ring.split(slot_bytes), zip(flags[::2], flags[1::2], strict=True)
        self._slots = [Slot(part, *pair) for part, pair in zip(parts, pairs, strict=True)]
        self._board = flags[0].board
        self._board.watch(self._failure)
        self.scratch = scratch
        self._frozen = {
            id(place): _Tensor(open_file(place), place.span.offset, place.span.size, place.at)
            for unit in units
            for place in unit.places
            if place.span is not None and place.in_file
        }
        self._parts = {unit.index: [self._frozen[id(p)] for p in unit.places if p.in_file] for unit in units}
        for unit in units:
            found = scratch.parts(unit) if scratch is not None else ()
            self._parts[unit.index] += [_Tensor(file, *part) for file, part in found]
        self._whole = {index: list(self._reads(parts)) for index, parts in self._parts.items()}
        self._of_unit = {
            index: list({id(part.file): part.file for part in parts}.values()) for index, parts in self._parts.items()
        }
        self._exposed: dict[int, Place] = {}  # by id: those of which user code has got an array
        self.read_bytes = 0  # asked for so far, with the rest of each block

    def has(self, unit: Unit) -> bool:
        """Whether a part of the unit is in files."""
        return unit.index in self._parts

    def load(
        self, unit: Unit, target: torch.Tensor, lane: Lane, spans: Iterable[tuple[int, int]] | None = None
    ) -> None:
        """Bring the unit's weights to ``target``, its device copy. ``spans``: of the image; None: all that files
        have."""
        reads = self._whole[unit.index] if spans is None else list(self._reads(self._inside(unit, spans)))
        for read in reads:
            slot = self._slots[self._next]
            self._next = (self._next + 1) % len(self._slots)
            slot.uses += 1
            before = slot.released.at(slot.uses - 1) if slot.uses > 1 else None
            done, abort = slot.loaded.at(slot.uses), self._board.aborted.at(1)
            try:
                memory = slot.bytes[: read.range.size]
                job = FileJob(
                    ranges=[read.range],
                    unit=read.unit,
                    target=memory,
                    priority=0,
                    ready=before,
                    also=read.after.last if read.after is not None and read.after.count else None,
                    done=done,
                    abort=abort,
                )
                self._worker.run(job)
                self.read_bytes += read.range.size
                lane.wait_flag(slot.loaded, slot.uses)
                for source, to, size in read.copies:
                    lane.copy(target[to : to + size], memory[source : source + size], Tag.PARAMETERS, unit.index)
            finally:  # else the slot's next read would wait for ever
                lane.write_flag(slot.released, slot.uses)

    def emit(self) -> None:
        """Report what was read since the last call."""
        self._meter.emit()

    def check(self, unit: Unit | None = None) -> None:
        """Raise if a read has failed. ``unit``: also if one of its files was changed."""
        self._board.raise_if_aborted()
        for file in self._of_unit[unit.index] if unit is not None else ():
            file.check()

    def check_all(self) -> None:
        """Raise if a read has failed, or a file was changed."""
        self.check()
        for file in {id(file): file for files in self._of_unit.values() for file in files}.values():
            file.check(content=True)

    def _failure(self) -> StorageError | None:
        """The read that has failed, in one line; None if none has."""
        failure = self._worker.failure()
        if failure is None:
            return None
        files = (file for files in self._of_unit.values() for file in files)
        path = next((f.path for f in files if failure.fd in (f.direct.number, f.plain.number)), "a file of weights")
        what = f"read bytes {failure.offset} to {failure.offset + failure.bytes} of {path}"
        if failure.error != errno.ENODATA:
            return storage_error(what, OSError(failure.error, os.strerror(failure.error)))
        error = StorageError(f"Cannot {what}: it is truncated. Restore it, and load the last checkpoint.")
        error.errno = failure.error
        return error

    def expose(self, place: Place) -> None:
        """User code gets the address of a weight's memory, through which it may write without our notice."""
        self._exposed[id(place)] = place

    def check_exposed(self) -> None:
        """Raise if user code has written a weight in such a way."""
        for place in self._exposed.values():
            part, file = self._frozen[id(place)], self.file_of(place)
            with without_torch_function():
                address = place.parameter.data_ptr()
            if not file.is_shown(address, part.offset, part.size):
                raise StormError(
                    f"Cannot go on: {place.name!r} is read from {file.path}, and was written through an array or "
                    "an address of its memory. Raise ram= so that it gets a home in RAM, or do not write it."
                )

    def file_of(self, place: Place) -> WeightFile:
        """The file that has this frozen weight."""
        file = self._frozen[id(place)].file
        assert isinstance(file, WeightFile)
        return file

    def _inside(self, unit: Unit, spans: Iterable[tuple[int, int]]) -> Iterator[_Tensor]:
        for first, last in spans:
            for file, offset, size, target, after in self._parts[unit.index]:
                start, end = max(first, target), min(last, target + size)
                if start < end:
                    yield _Tensor(file, offset + start - target, end - start, start, after)

    def _reads(self, parts: Iterable[_Tensor]) -> Iterator[Read]:
        """Reads that bring these parts: neighbours together, a slot at most."""
        ordered = sorted(parts, key=lambda part: (str(part.file.path), part.offset))
        while ordered:
            file, end, after, count = ordered[0].file, ordered[0].offset, ordered[0].after, 0
            for part in ordered:
                if part.file is not file or part.after is not after or part.offset - end > _GAP:
                    break
                end, count = max(end, part.offset + part.size), count + 1
            run, ordered = ordered[:count], ordered[count:]
            yield from self._run(file, run, run[0].offset, end)

    def _run(self, file: Source, parts: Sequence[_Tensor], start: int, end: int) -> Iterator[Read]:
        unit, after = file.direct.alignment, parts[0].after
        first, direct_end = round_down(start, unit), min(round_up(end, unit), file.whole_bytes)
        for at in range(first, direct_end, self._slot_bytes):
            size = min(self._slot_bytes, direct_end - at)
            if copies := _copies(parts, at, size):
                yield Read(Range(file.direct.number, at, size), unit, copies, after)
        if end > direct_end:  # within the file's last block
            at = max(direct_end, start)
            yield Read(Range(file.plain.number, at, end - at), 1, _copies(parts, at, end - at), after)


def _copies(parts: Iterable[_Tensor], at: int, size: int) -> list[Copy]:
    """What to copy from a read of ``size`` bytes at ``at``; tensors that are neighbours on both sides at once."""
    found: list[Copy] = []
    for _, offset, count, target, _ in parts:
        start, end = max(at, offset), min(at + size, offset + count)
        if start >= end:
            continue
        copy = Copy(start - at, target + start - offset, end - start)
        last = found[-1] if found else None
        if last is not None and (last.source + last.size, last.target + last.size) == (copy.source, copy.target):
            found[-1] = Copy(last.source, last.target, last.size + copy.size)
        else:
            found.append(copy)
    return found
