"""Where a unit's optimizer states lie in files, perhaps with its weights, and the chunks in which they are read and
written.

A unit has three regions: exp_avg, exp_avg_sq, masters. A fourth has the weights, where these lie there too. In each,
every parameter lies in one piece, so that it can be mapped as a tensor. A chunk is a range of all regions, and begins
at a whole page of each, which direct I/O needs: a parameter that does not fit into the rest of a chunk begins the next
one, and one that is larger than a chunk is cut where all regions are at a page. Weights that are not trained follow
those of the last chunk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...core.sizes import round_down, round_up
from .unit import ALIGNMENT, Place, Unit

PAGE = 4096  # of files
GRAIN = 2048  # elements: whole pages of moments (4 bytes), of masters and of weights (2 or 4 bytes)


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a parameter in a chunk. ``moments_at``, ``masters_at``, ``weights_at``: bytes from the chunk's
    beginnings on."""

    place: Place
    start: int
    count: int
    moments_at: int
    masters_at: int
    weights_at: int


@dataclass(frozen=True, slots=True)
class FileChunk:
    """Bytes of the regions, from page to page. exp_avg_sq has the range of exp_avg. ``weights``: empty if they have
    their home in RAM."""

    moments: range
    masters: range
    weights: range
    pieces: tuple[Piece, ...]

    @property
    def memory_bytes(self) -> int:
        """RAM to read it to."""
        return 2 * len(self.moments) + len(self.masters) + len(self.weights)


@dataclass(eq=False)
class FileLayout:
    """A unit's regions and chunks. ``at``: where a parameter begins in the regions of moments and of masters.
    ``weights_at``: and where in that of the weights, also one that is not trained; empty without that region."""

    chunks: list[FileChunk] = field(default_factory=list)
    moments_bytes: int = 0
    masters_bytes: int = 0
    weights_bytes: int = 0
    at: dict[int, tuple[int, int]] = field(default_factory=dict)
    weights_at: dict[int, int] = field(default_factory=dict)

    @property
    def regions(self) -> list[int]:
        """The bytes of each region of states."""
        return [self.moments_bytes, self.moments_bytes, self.masters_bytes]


def layout_of(unit: Unit, most: int, *, weights: bool = False) -> FileLayout:
    """Chunks of at most about ``most`` elements, at least one grain. ``weights``: with the unit's weights, but not
    those that the model's own files have."""
    most = max(GRAIN, round_down(most, GRAIN))
    layout, pieces = FileLayout(), list[Piece]()
    moments = masters = images = filled = 0  # of the open chunk

    def close() -> None:
        nonlocal moments, masters, images, filled
        begin = layout.moments_bytes, layout.masters_bytes, layout.weights_bytes
        layout.moments_bytes += round_up(moments, PAGE)
        layout.masters_bytes += round_up(masters, PAGE)
        layout.weights_bytes += round_up(images, PAGE)
        mine = (range(begin[0], layout.moments_bytes), range(begin[1], layout.masters_bytes))
        layout.chunks.append(FileChunk(*mine, range(begin[2], layout.weights_bytes), tuple(pieces)))
        pieces.clear()
        moments = masters = images = filled = 0

    for place in unit.trained:
        if pieces and filled + place.count > most:
            close()
        moments, masters, images = (round_up(at, ALIGNMENT) for at in (moments, masters, images))
        layout.at[place.index] = layout.moments_bytes + moments, layout.masters_bytes + masters
        if weights:
            layout.weights_at[place.index] = layout.weights_bytes + images
        done = 0
        while done < place.count:
            count = min(place.count - done, most)
            pieces.append(Piece(place, done, count, moments, masters, images))
            done, filled = done + count, filled + count
            moments, masters = moments + 4 * count, masters + count * place.master_bytes // place.count
            images += count * place.dtype.itemsize if weights else 0
            if done < place.count:
                close()
    if pieces:
        close()
    for place in unit.places if weights else ():
        if not place.trained and place.span is None:
            layout.weights_at[place.index] = round_up(layout.weights_bytes, ALIGNMENT)
            layout.weights_bytes = layout.weights_at[place.index] + place.count * place.dtype.itemsize
    layout.weights_bytes = round_up(layout.weights_bytes, PAGE)
    return layout


def memory_bytes(layouts: Iterable[FileLayout]) -> int:
    """RAM for the largest chunk."""
    return max((chunk.memory_bytes for layout in layouts for chunk in layout.chunks), default=0)
