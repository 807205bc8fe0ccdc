"""Where a unit's optimizer states lie in files, and the chunks in which they are read and written.

A unit has three regions: exp_avg, exp_avg_sq, masters. In each, every parameter lies in one piece, so that it can be
mapped as a tensor. A chunk is a range of all three, and begins at a whole page of each, which direct I/O needs: a
parameter that does not fit into the rest of a chunk begins the next one, and one that is larger than a chunk is cut
where all regions are at a page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...core.sizes import round_down, round_up
from .unit import ALIGNMENT, Place, Unit

PAGE = 4096  # of files
GRAIN = 2048  # elements: whole pages of moments (4 bytes) and of masters (2 or 4 bytes)


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a parameter in a chunk. ``moments_at``, ``masters_at``: bytes from the chunk's beginnings on."""

    place: Place
    start: int
    count: int
    moments_at: int
    masters_at: int


@dataclass(frozen=True, slots=True)
class FileChunk:
    """Bytes of the regions, from page to page. exp_avg_sq has the range of exp_avg."""

    moments: range
    masters: range
    pieces: tuple[Piece, ...]

    @property
    def memory_bytes(self) -> int:
        """RAM to read it to."""
        return 2 * len(self.moments) + len(self.masters)


@dataclass(eq=False)
class FileLayout:
    """A unit's regions and chunks. ``at``: where a parameter begins in the regions of moments and of masters."""

    chunks: list[FileChunk] = field(default_factory=list)
    moments_bytes: int = 0
    masters_bytes: int = 0
    at: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def regions(self) -> list[int]:
        """The bytes of each region."""
        return [self.moments_bytes, self.moments_bytes, self.masters_bytes]


def layout_of(unit: Unit, most: int) -> FileLayout:
    """Chunks of at most about ``most`` elements, at least one grain."""
    most = max(GRAIN, round_down(most, GRAIN))
    layout, pieces = FileLayout(), list[Piece]()
    moments = masters = filled = 0  # of the open chunk

    def close() -> None:
        nonlocal moments, masters, filled
        begin = layout.moments_bytes, layout.masters_bytes
        layout.moments_bytes += round_up(moments, PAGE)
        layout.masters_bytes += round_up(masters, PAGE)
        ranges = range(begin[0], layout.moments_bytes), range(begin[1], layout.masters_bytes)
        layout.chunks.append(FileChunk(*ranges, tuple(pieces)))
        pieces.clear()
        moments = masters = filled = 0

    for place in unit.trained:
        if pieces and filled + place.count > most:
            close()
        moments, masters = round_up(moments, ALIGNMENT), round_up(masters, ALIGNMENT)
        layout.at[place.index] = layout.moments_bytes + moments, layout.masters_bytes + masters
        done = 0
        while done < place.count:
            count = min(place.count - done, most)
            pieces.append(Piece(place, done, count, moments, masters))
            done, filled = done + count, filled + count
            moments, masters = moments + 4 * count, masters + count * place.master_bytes // place.count
            if done < place.count:
                close()
    if pieces:
        close()
    return layout


def memory_bytes(layouts: Iterable[FileLayout]) -> int:
    """RAM for the largest chunk."""
    return max((chunk.memory_bytes for layout in layouts for chunk in layout.chunks), default=0)
