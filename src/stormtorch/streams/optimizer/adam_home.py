"""Adam's states of a unit, at home and on their way through the device, and the calls that make up one update."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from ...memory.lanes.flags import Flag
from ...memory.lanes.lane import Event
from ...memory.pools.pool import Piece
from ...native.update import AdamStep, AdamTensors
from ..units.chunks import Chunk
from ..units.unit import Place, Unit
from ..weights.residency import HomeGate

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names of these states
_SPLIT_DTYPE = {torch.bfloat16: torch.int16, torch.float16: torch.float32}


@dataclass(eq=False)
class AdamHome:
    """A unit's optimizer states at home."""

    unit: Unit
    exp_avg: torch.Tensor  # fp32, flat
    exp_avg_sq: torch.Tensor
    masters: torch.Tensor  # bytes
    flags: list[Flag]  # one for each trained parameter: the run that begins with it is done
    gate: HomeGate
    steps: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    on_device: bool = False  # this unit is updated on the device
    waiting: Waiting | None = None  # a device update that was requested and has not begun
    staged: deque[Staged] = field(default_factory=deque)  # its first chunks on the device, or on their way there
    kept: Staged | None = None  # permanent device memory for its states
    fresh: bool = False  # the kept states are current
    dirty: bool = False  # the states at home are out of date
    loads_seen: int = 0

    def __post_init__(self) -> None:
        self.steps = [0] * len(self.unit.trained)
        self.values = [0] * len(self.unit.trained)

    def states(self, chunk: Chunk) -> list[torch.Tensor]:
        """The bytes of the chunk's exp_avg, exp_avg_sq and masters."""
        moments = [flat[chunk.states.start : chunk.states.stop] for flat in (self.exp_avg, self.exp_avg_sq)]
        return [*(part.view(torch.uint8) for part in moments), self.masters[chunk.masters.start : chunk.masters.stop]]

    def moment(self, which: str, place: Place) -> torch.Tensor:
        flat: torch.Tensor = getattr(self, which)
        return flat[place.state_at : place.state_at + place.count].as_strided(place.shape, place.stride)

    def narrow(self, which: str, place: Place) -> torch.Tensor:
        """The moment in the parameter's own dtype, converted within its own memory: a second copy may not fit."""
        wide = self.moment(which, place)
        if place.dtype == torch.float32:
            return wide
        flat: torch.Tensor = getattr(self, which)
        memory = flat[place.state_at : place.state_at + place.count].view(torch.uint8)
        target = place.view(memory, 0, place.dtype)
        target.copy_(wide.to(place.dtype))
        return target

    def master(self, place: Place) -> torch.Tensor | None:
        """The part of the fp32 weight kept beside the image: 16-bit remainders for bf16, whole fp32 weights for
        fp16."""
        if not place.is_split:
            return None
        return place.view(self.masters, place.master_at, _SPLIT_DTYPE[place.dtype])


@dataclass(eq=False)
class Run:
    """Trained places ``first`` to ``last`` of a unit, updated by one call."""

    first: Place
    last: Place
    step: AdamStep

    @property
    def count(self) -> int:
        return self.last.state_at + self.last.count - self.first.state_at


@dataclass(eq=False)
class Waiting:
    """A requested update on the device: the runs, and the gradients to use."""

    runs: list[Run]
    wide: bool
    grads: torch.Tensor  # at home, unless they remained on the device
    there: bool
    stored: Event | None
    ready: Event | None  # compute has made the gradients that remained on the device
    factor: torch.Tensor | None  # on the device
    done: int = 0  # states before this one are updated: an error came between two calls


@dataclass(eq=False)
class Staged:
    """States of a unit or a chunk, perhaps with gradients, on the device or on their way there."""

    chunk: Chunk
    pieces: list[Piece]  # a shared set, or the unit's own
    parts: list[torch.Tensor]  # bytes of exp_avg, exp_avg_sq, masters, and of gradients if loaded too
    loaded: Event


def states_of(unit: Unit, *, wide: bool) -> list[int]:
    """The bytes of a unit's exp_avg, exp_avg_sq, masters and gradients."""
    return [unit.state_count * 4, unit.state_count * 4, unit.master_bytes, unit.wide_bytes if wide else unit.grad_bytes]


def adjoin(last: Place, place: Place, wide: bool) -> bool:
    """Whether ``place`` follows ``last`` without a gap in every buffer."""
    size = last.dtype.itemsize
    return (
        last.at + last.count * size == place.at
        and last.state_at + last.count == place.state_at
        and last.master_at + last.master_bytes == place.master_at
        and (
            last.wide_at + last.count * 4 == place.wide_at
            if wide
            else last.grad_at + last.count * size == place.grad_at
        )
    )


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """Buffers of an update: the whole image, the states of ``chunk``, and the unit's gradients from byte ``grads_at``
    on."""

    chunk: Chunk
    image: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    masters: torch.Tensor
    grads: torch.Tensor
    grads_at: int = 0


def bind(run: Run, buffers: Buffers, *, wide: bool, factor: torch.Tensor | None, done: int = 0) -> AdamTensors | None:
    """The part of ``run`` that lies in the chunk, from state ``done`` on; None if it has none."""
    first, states = run.first, buffers.chunk.states
    start = max(first.state_at, states.start, done)
    count = min(first.state_at + run.count, states.stop) - start
    if count <= 0:
        return None
    skipped = start - first.state_at

    def part(buffer: torch.Tensor, at: int, dtype: torch.dtype) -> torch.Tensor:
        at += skipped * dtype.itemsize
        return buffer[at : at + count * dtype.itemsize].view(dtype)

    grad_at = (first.wide_at if wide else first.grad_at) - buffers.grads_at
    split, master_at = _SPLIT_DTYPE.get(first.dtype), first.master_at - buffers.chunk.masters.start
    return AdamTensors(
        weight=part(buffers.image, first.at, first.dtype),
        master=part(buffers.masters, master_at, split) if split is not None else None,
        exp_avg=buffers.exp_avg[start - states.start :][:count],
        exp_avg_sq=buffers.exp_avg_sq[start - states.start :][:count],
        grad=part(buffers.grads, grad_at, torch.float32 if wide else first.dtype),
        grad_factor=factor,
    )
