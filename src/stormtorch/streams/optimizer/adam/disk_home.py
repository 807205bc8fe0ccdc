"""States of some units in scratch files, and their updates there, perhaps with their weights; the states of the other
units in RAM.

The CPU updates such a unit chunk by chunk, in the memory of the threads that read it and write it back
(native/worker/files.py). No lane copies these states, and the GPU updates none of them: a disk brings a tenth of what
the CPU can update, so the GPU has nothing to add. The gradients come from RAM, as for any unit, and the new weights go
to the home image, or to a file of their own (weights/in_scratch.py). A unit's next load waits for its updates, and not
for their way back to the file, unless it reads that file; the next update of a chunk waits for that.

User code sees the states as mappings of the files."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ....core.errors import StorageError
from ....core.events import Sink
from ....core.tags import Tag
from ....memory.disk.calls import storage_error
from ....memory.disk.scratch import ScratchFile
from ....memory.disk.stored import MappedFile, MappedRange, StoredTensor
from ....memory.host.arena import HostArena
from ....memory.lanes.flags import Flag, Flags
from ....native.update import FileTensors
from ....native.worker.files import FileJob, FileWorker, Range
from ....native.worker.jobs import FileMeter
from ...gradients.home import GradHome
from ...units.file_layout import PAGE, FileChunk, FileLayout
from ...units.unit import Place, Unit
from ...weights.in_scratch import ScratchWeights, Written
from ..updater import MASTER
from .home import AdamHome, Run
from .state_home import MOMENTS, SPLIT_DTYPE, RamHome

_MOST_BOUND = 16  # forms of a chunk's update that are kept


@dataclass(eq=False)
class _Chunk:
    """A chunk with its ranges in the files."""

    layout: FileChunk
    ranges: list[Range]
    updated: Flag
    written: Written
    bound: dict[object, list[FileTensors]] = field(default_factory=dict)  # of earlier updates, for the next

    @property
    def masters_at(self) -> int:
        """Where masters begin in the memory of a job."""
        return 2 * len(self.layout.moments)

    @property
    def weights_at(self) -> int | None:
        """Where weights begin there; None if they have their home in RAM."""
        return self.masters_at + len(self.layout.masters) if self.layout.weights else None


@dataclass(eq=False)
class _UnitOnDisk:
    layout: FileLayout
    regions: list[MappedRange]  # exp_avg, exp_avg_sq, masters
    chunks: list[_Chunk]


class DiskHome(RamHome):
    """Keeps the states of the units in ``layouts``, by index, in ``files``; each region of a unit lies in one file, in
    turns."""

    def __init__(
        self,
        units: list[Unit],
        arena: HostArena,
        layouts: dict[int, FileLayout],
        *,
        files: Sequence[ScratchFile],
        worker: FileWorker,
        board: Flags,
        flags: Iterator[Flag],
        sink: Sink,
        weights: ScratchWeights | None = None,
    ) -> None:
        super().__init__([unit for unit in units if unit.index not in layouts], arena)
        self._files, self._worker, self._board = list(files), worker, board
        self._meter = FileMeter(worker, sink, Tag.OPTIMIZER)
        self._units: dict[int, _UnitOnDisk] = {}
        self._weights = weights
        self._files_of_all = [*files, *(weights.files if weights is not None else ())]
        self._alignment = max(file.alignment for file in self._files_of_all)
        self._mapped = list[MappedFile]()
        for file in files:
            self._mapped.append(MappedFile(file))
        for number, (index, layout) in enumerate(layouts.items()):
            regions, numbers = list[MappedRange](), list[int]()
            for region, size in enumerate(layout.regions):
                which = file_of(number, region, len(files))
                extent = self._files[which].take(size)
                regions.append(MappedRange(self._mapped[which], extent.offset, size))
                numbers.append(self._files[which].number)
            chunks = [
                self._chunk(units[index], which, c, _ranges(c, regions, numbers), flags)
                for which, c in enumerate(layout.chunks)
            ]
            self._units[index] = _UnitOnDisk(layout, regions, chunks)
        board.watch(self._failure)

    def _chunk(self, unit: Unit, number: int, layout: FileChunk, ranges: list[Range], flags: Iterator[Flag]) -> _Chunk:
        updated = next(flags)
        if not layout.weights:
            return _Chunk(layout, ranges, updated, Written(next(flags)))
        assert self._weights is not None
        at = 2 * len(layout.moments) + len(layout.masters)
        where, written = self._weights.of_chunk(unit, number, layout, at)
        return _Chunk(layout, [*ranges, where], updated, written)

    # --- updates

    def update(
        self,
        home: AdamHome,
        runs: list[Run],
        grads: GradHome,
        image: torch.Tensor,
        factor: torch.Tensor | None,
    ) -> None:
        """Queue an update of the unit, when ``grads.arrived`` says that nothing reads its weights any more."""
        self._board.raise_if_aborted()
        source, wide = grads.flat(), grads.is_wide
        for chunk in self._units[home.unit.index].chunks:
            updates = [
                (tensors if factor is None else tensors.scaled_by(factor), run.step.scalars)
                for run in runs
                for tensors in _bound(chunk, run, image, source, wide=wide)
            ]
            if not updates:
                continue
            job = FileJob(
                ranges=chunk.ranges,
                unit=self._alignment,
                updates=updates,
                priority=home.unit.index,
                ready=grads.arrived.at(grads.arrivals),
                also=chunk.written.last,
                done=chunk.updated.at(chunk.written.count + 1),
                written=chunk.written.flag.at(chunk.written.count + 1),
                abort=self._board.aborted.at(1),
                keep=self._files_of_all,
            )
            if self._weights is not None:
                self._weights.changes(home.unit)
            self._worker.run(job)
            chunk.written.count += 1
            home.gate.runs.append((chunk.updated, chunk.written.count))

    def refresh_weights(self, unit: Unit) -> None:
        """Bring the unit's parameters, as user code sees them, up to date."""
        if self._weights is not None and self._weights.refresh(unit):
            self._board.raise_if_aborted()  # a write may have failed before

    def emit(self) -> None:
        """Report what was read and written since the last call."""
        self._meter.emit()

    def _failure(self) -> StorageError | None:
        """The access that failed, in one line; None if none has."""
        failure = self._worker.failure()
        if failure is None:
            return None
        file = next(file for file in self._files_of_all if file.number == failure.fd)
        verb, of = "write" if failure.write else "read", "optimizer states" if file in self._files else "weights"
        what = f"{verb} {of}: bytes {failure.offset} to {failure.offset + failure.bytes} of {file.name}"
        if failure.error == errno.ENODATA:
            found = storage_error(what, OSError(errno.EIO, ""), numbers=f"no call moves more than {failure.got} bytes")
        else:
            found = storage_error(what, OSError(failure.error, os.strerror(failure.error)))
        longer = StorageError(f"{found} Weights and states are of different steps now: load the last checkpoint.")
        longer.errno = found.errno
        return longer

    # --- as a StateHome

    def holds(self, unit: Unit) -> bool:
        """Whether the unit's states lie in a file."""
        return unit.index in self._units

    def shown(self, place: Place) -> dict[str, torch.Tensor]:
        on_disk = self._units.get(place.unit.index)
        if on_disk is None:
            return super().shown(place)
        moments_at, masters_at = on_disk.layout.at[place.index]
        first, second, masters = on_disk.regions
        found = {
            name: place.view(region.bytes, moments_at, torch.float32)
            for name, region in zip(MOMENTS, (first, second), strict=True)
        }
        if place.is_split:
            found[MASTER] = place.view(masters.bytes, masters_at, SPLIT_DTYPE[place.dtype])
        return found

    def stored_tensor(self, place: Place, name: str) -> StoredTensor | None:
        """A state of a parameter that lies in a file as a contiguous tensor, for code that moves all of its bytes."""
        on_disk = self._units.get(place.unit.index)
        if on_disk is None or name not in (*MOMENTS, MASTER) or not place.is_contiguous:
            return None
        (moments_at, masters_at), regions = on_disk.layout.at[place.index], on_disk.regions
        if name == MASTER:
            return StoredTensor(regions[2], masters_at, place.master_bytes) if place.is_split else None
        return StoredTensor(regions[MOMENTS.index(name)], moments_at, 4 * place.count)

    def refresh(self, unit: Unit) -> None:
        if (on_disk := self._units.get(unit.index)) is None:
            super().refresh(unit)
            return
        for chunk in on_disk.chunks:
            chunk.written.flag.wait(chunk.written.count)
        self._board.raise_if_aborted()  # a write may have failed before
        for region in on_disk.regions:
            region.drop(0, region.size)

    def written(self, place: Place) -> None:
        if (on_disk := self._units.get(place.unit.index)) is None:
            super().written(place)
            return
        (moments_at, masters_at), (first, second, masters) = on_disk.layout.at[place.index], on_disk.regions
        first.sync(moments_at, moments_at + 4 * place.count)
        second.sync(moments_at, moments_at + 4 * place.count)
        masters.sync(masters_at, masters_at + place.master_bytes)

    def forget(self) -> None:
        super().forget()
        for file in self._mapped:
            file.close()
        self._units.clear()


def file_of(number: int, region: int, files: int) -> int:
    """The file of a region of the unit that is ``number`` among those on disk."""
    return (3 * number + region) % files


def _ranges(chunk: FileChunk, regions: list[MappedRange], numbers: list[int]) -> list[Range]:
    """The chunk's bytes, one region after the other in the memory of a job."""
    found, at = list[Range](), 0
    for region, number, mine in zip(regions, numbers, (chunk.moments, chunk.moments, chunk.masters), strict=True):
        if mine:
            found.append(Range(number, region.offset + mine.start, len(mine), at))
        at += len(mine)
    assert all(r.offset % PAGE == r.size % PAGE == 0 for r in found)
    return found


def _bound(chunk: _Chunk, run: Run, image: torch.Tensor, grads: torch.Tensor, *, wide: bool) -> list[FileTensors]:
    """The part of ``run`` that lies in the chunk: one update, unless there are gaps between its parameters in the file.
    Kept for the next step, which has the same buffers."""
    key = run.first.index, run.last.index, wide, image.data_ptr(), grads.data_ptr()
    if (known := chunk.bound.get(key)) is not None:
        return known
    first, found = chunk.layout.moments, list[FileTensors]()
    begun: tuple[int, int, int, int, int, int, Place] | None = None  # elements, and where they begin

    def close() -> None:
        if begun is not None:
            count, at, grad_at, moments_at, masters_at, weights_at, place = begun
            dtype = torch.float32 if wide else place.dtype
            found.append(
                FileTensors(
                    weight=image[at : at + count * place.dtype.itemsize].view(place.dtype)
                    if chunk.weights_at is None
                    else chunk.weights_at + weights_at,
                    dtype=place.dtype,
                    count=count,
                    grad=grads[grad_at : grad_at + count * dtype.itemsize].view(dtype),
                    exp_avg=moments_at,
                    exp_avg_sq=len(first) + moments_at,
                    master=chunk.masters_at + masters_at if place.is_split else None,
                )
            )

    for piece in chunk.layout.pieces:
        place = piece.place
        if not run.first.index <= place.index <= run.last.index:
            continue
        size, master_size = place.dtype.itemsize, place.master_bytes // place.count
        at = place.at + piece.start * size
        grad_at = place.wide_at + piece.start * 4 if wide else place.grad_at + piece.start * size
        if begun is not None:
            count, was_at, _, moments_at, masters_at, _, _ = begun
            ends = was_at + count * size, moments_at + 4 * count, masters_at + count * master_size
            if ends == (at, piece.moments_at, piece.masters_at):
                begun = (count + piece.count, *begun[1:])
                continue
        close()
        begun = piece.count, at, grad_at, piece.moments_at, piece.masters_at, piece.weights_at, place
    close()
    if len(chunk.bound) >= _MOST_BOUND:
        chunk.bound.clear()
    chunk.bound[key] = found
    return found
