"""Cuts a unit's states into chunks that pass through the device one after another.

A unit's states take six times the room of its weights in bf16. In chunks, they need the room of a few of these only,
however large the unit is, and the first is updated while the next is on its way."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.sizes import round_down
from .unit import Place, Unit

_GRAIN = 64  # elements: cuts within a parameter keep the alignment of every buffer


@dataclass(frozen=True, slots=True)
class Chunk:
    """The chunk's range in each of the unit's buffers: ``states`` in elements, the others in bytes."""

    states: range
    masters: range
    grads: range
    wide: range

    def gradients(self, *, wide: bool) -> range:
        """The range of the gradients, in fp32 (``wide``) or in the parameters' dtypes."""
        return self.wide if wide else self.grads

    @property
    def sizes(self) -> list[int]:
        """The bytes of exp_avg, exp_avg_sq, masters and gradients, in the larger form."""
        moments = 4 * len(self.states)
        return [moments, moments, len(self.masters), max(len(self.grads), len(self.wide))]


def whole_of(unit: Unit) -> Chunk:
    """The whole unit as one chunk."""
    return Chunk(range(unit.state_count), range(unit.master_bytes), range(unit.grad_bytes), range(unit.wide_bytes))


def chunks_of(unit: Unit, most: int) -> list[Chunk]:
    """Cut a unit into chunks of at most about ``most`` elements, in the order of the parameters."""
    most = max(_GRAIN, round_down(most, _GRAIN))
    chunks: list[Chunk] = []
    begin: tuple[int, ...] | None = None
    end: tuple[int, ...] = ()
    filled = 0
    for place in unit.trained:
        done = 0
        while done < place.count:
            left, room = place.count - done, most - filled
            taken = left if left <= room else round_down(room, _GRAIN)
            if begin is not None and not taken:
                chunks.append(_between(begin, end))
                begin, filled = None, 0
                continue
            begin = _offsets(place, done) if begin is None else begin
            done, filled = done + taken, filled + taken
            end = _offsets(place, done)
    if begin is not None:
        chunks.append(_between(begin, end))
    return chunks


def _offsets(place: Place, element: int) -> tuple[int, ...]:
    master = place.master_bytes // place.count
    return (
        place.state_at + element,
        place.master_at + element * master,
        place.grad_at + element * place.dtype.itemsize,
        place.wide_at + element * place.wide_dtype.itemsize,
    )


def _between(begin: tuple[int, ...], end: tuple[int, ...]) -> Chunk:
    return Chunk(*(range(first, last) for first, last in zip(begin, end, strict=True)))
