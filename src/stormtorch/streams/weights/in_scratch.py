"""Weights of trained units in scratch files, where RAM has no room for them.

A load reads them through the ring of from_files.py. An update reads and writes them with the unit's states
(optimizer/adam/disk_home.py), chunk by chunk: a chunk has a `Written`, by which reads wait for the last update of it.
User code sees parameters as mappings of the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...memory.disk.scratch import ScratchFile
from ...memory.disk.stored import MappedFile, MappedRange, StoredTensor
from ...memory.lanes.flags import Flag
from ...native.worker.files import Range
from ...native.worker.jobs import FlagValue
from ..units.file_layout import FileChunk, FileLayout
from ..units.unit import Unit


@dataclass(eq=False)
class Written:
    """Says whether a chunk is in its file: ``flag`` counts updates that are there, ``count`` those asked for."""

    flag: Flag
    count: int = 0

    @property
    def last(self) -> FlagValue:
        """Reached when all updates that were asked for are in the file."""
        return self.flag.at(self.count)


class Part(NamedTuple):
    """Bytes of a unit's image, and where they are in its file."""

    offset: int
    size: int
    target: int
    written: Written | None  # None: no update changes them


class ScratchSource:
    """A scratch file, as from_files.py reads it."""

    def __init__(self, file: ScratchFile) -> None:
        self.path, self.direct, self.plain, self.whole_bytes = Path(file.name), file, file, file.size_bytes

    def check(self, *, content: bool = False) -> None:
        """No other process can change it: it has no name."""


@dataclass(eq=False)
class _UnitInScratch:
    layout: FileLayout
    source: ScratchSource
    region: MappedRange
    written: list[Written]  # by chunk


class ScratchWeights:
    """The weights of the units in ``layouts``, by index, in ``files``, in turns."""

    def __init__(
        self,
        units: Sequence[Unit],
        layouts: dict[int, FileLayout],
        *,
        files: Sequence[ScratchFile],
        flags: Iterator[Flag],
    ) -> None:
        self.files = list(files)
        self._units: dict[int, _UnitInScratch] = {}
        self._changed: set[int] = set()  # units that were updated since their mappings were last up to date
        self._mapped = [MappedFile(file) for file in files]
        sources = [ScratchSource(file) for file in files]
        for number, (index, layout) in enumerate(layouts.items()):
            which = number % len(files)
            extent = files[which].take(layout.weights_bytes)
            region = MappedRange(self._mapped[which], extent.offset, layout.weights_bytes)
            written = [Written(next(flags)) for _ in layout.chunks]
            self._units[index] = _UnitInScratch(layout, sources[which], region, written)
            for place in units[index].places:
                at = layout.weights_at.get(place.index)
                if at is not None:
                    place.stored = StoredTensor(region, at, place.count * place.dtype.itemsize)

    def holds(self, unit: Unit) -> bool:
        """Whether the unit's weights lie here."""
        return unit.index in self._units

    def parts(self, unit: Unit) -> Iterator[tuple[ScratchSource, Part]]:
        """All of the unit's weights here; neighbours of one chunk wait for the same update."""
        mine = self._units.get(unit.index)
        if mine is None:
            return
        for chunk, written in zip(mine.layout.chunks, mine.written, strict=True):
            for piece in chunk.pieces:
                size = piece.place.dtype.itemsize
                offset = mine.region.offset + chunk.weights.start + piece.weights_at
                yield mine.source, Part(offset, piece.count * size, piece.place.at + piece.start * size, written)
        for place in unit.places:
            if not place.trained and place.stored is not None:
                yield mine.source, Part(mine.region.offset + place.stored.at, place.stored.nbytes, place.at, None)

    def of_chunk(self, unit: Unit, number: int, chunk: FileChunk, at: int) -> tuple[Range, Written]:
        """Where a chunk's weights are in their file, and from ``at`` on in the memory of an update."""
        mine = self._units[unit.index]
        offset = mine.region.offset + chunk.weights.start
        return Range(mine.source.direct.number, offset, len(chunk.weights), at), mine.written[number]

    def changes(self, unit: Unit) -> None:
        """An update of the unit was asked for."""
        if self.holds(unit):
            self._changed.add(unit.index)

    def refresh(self, unit: Unit) -> bool:
        """Bring the parameters of the unit, as user code sees them, up to date. Waits. Returns whether they were
        not."""
        if unit.index not in self._changed:
            return False
        mine = self._units[unit.index]
        for written in mine.written:
            written.flag.wait(written.count)
        mine.region.drop(0, mine.region.size)
        self._changed.discard(unit.index)
        return True

    def forget(self) -> None:
        """Close the descriptors; parameters remain mappings of the files."""
        for file in self._mapped:
            file.close()
        self._units.clear()
