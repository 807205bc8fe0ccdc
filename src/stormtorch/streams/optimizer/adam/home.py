"""The updates of a unit: requested, on their way through the device, done; and the calls that make up one update."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ....memory.lanes.flags import Flag
from ....memory.lanes.lane import Event
from ....memory.pools.pool import Piece
from ....native.update import AdamStep, AdamTensors
from ...gradients.home import GradHome
from ...units.chunks import Chunk, whole_of
from ...units.unit import Place, Unit
from ...weights.residency import HomeGate
from .settings import adam_step
from .state_home import SPLIT_DTYPE, States

if TYPE_CHECKING:
    from .ahead import Begun

_MOST_BOUND = 64  # updates of a unit whose tensors are kept


class AdamState(enum.Enum):
    """Where a unit is updated and has its current states, and what the states occupy. Except for DISK, `StateHome` has
    memory for them in every case."""

    HOME = "home"  # updated by the CPU; nothing on the device
    PASSING = "passing"  # updated on the device; those in ``staged`` occupy sets that all units share
    DISK = "disk"  # updated by the CPU in memory of its own; the states lie in a file
    RESERVED = "reserved"  # updated on the device; ``kept`` is the unit's own memory there, without current contents
    DEVICE = "device"  # updated on the device; ``kept`` has the current states, and those at home are out of date


@dataclass(eq=False)
class AdamHome:
    """A unit's updates, and what the device has of its states; a `StateHome` keeps the states."""

    unit: Unit
    flags: list[Flag]  # one for each trained parameter: the run that begins with it is done
    gate: HomeGate
    steps: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    state: AdamState = AdamState.HOME
    waiting: Waiting | None = None  # a device update that was requested and has not begun
    staged: deque[Staged] = field(default_factory=deque)  # its first chunks on the device, or on their way there
    kept: Staged | None = None  # permanent device memory for its states
    ahead: Begun | None = None  # an update that backward has begun, into spare memory
    ahead_flags: list[tuple[Flag, int]] = field(default_factory=list)  # of the last one, unless a step took it over
    taken: Begun | None = None  # the last one that a step took over
    loads_seen: int = 0
    has_spare: bool = False  # memory for updates ahead: the device does none of its updates

    def __post_init__(self) -> None:
        self.steps = [0] * len(self.unit.trained)
        self.values = [0] * len(self.unit.trained)
        self.whole = whole_of(self.unit)

    @property
    def on_device(self) -> bool:
        """Whether this unit is updated on the device."""
        return self.state not in (AdamState.HOME, AdamState.DISK)

    @property
    def on_disk(self) -> bool:
        """Whether the unit's states lie in a file."""
        return self.state is AdamState.DISK

    def next_flag(self, run: Run) -> tuple[Flag, int]:
        """The flag for a job of ``run``, with its next value."""
        number = self.unit.trained.index(run.first)
        self.values[number] += 1
        return self.flags[number], self.values[number]

    def join_ahead(self) -> None:
        """Block until no update ahead that no step took over runs any more."""
        for flag, value in self.ahead_flags:
            flag.wait(value)
        self.ahead_flags = []


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


def runs_of(home: AdamHome, grads: GradHome, hyper: dict[int, dict[str, Any]]) -> Iterator[Run]:
    """The runs of an update of the unit's parameters that have a gradient and are in ``hyper`` (by index). Counts their
    steps."""
    run: Run | None = None
    key: object = None
    for number, place in enumerate(home.unit.trained):
        if place.index not in grads.present or place.index not in hyper:
            continue
        home.steps[number] += 1
        settings = hyper[place.index]
        new_key = (id(settings), home.steps[number], place.dtype)
        if run is not None and key == new_key and adjoin(run.last, place, grads.is_wide):
            run.last = place
            continue
        if run is not None:
            yield run
        run, key = Run(place, place, adam_step(settings, home.steps[number])), new_key
    if run is not None:
        yield run


@dataclass(frozen=True)
class Buffers:
    """Buffers of an update: the whole image, the states of a chunk, and the unit's gradients from byte ``grads_at``
    on."""

    image: torch.Tensor
    states: States
    grads: torch.Tensor
    grads_at: int = 0


def bound(run: Run, buffers: Buffers, *, wide: bool, factor: torch.Tensor | None) -> AdamTensors | None:
    """As `bind`. Where the buffers are those of an earlier step, so is the result, but for the factor: to make it and
    to check it takes longer than all else that the host does for an update."""
    addresses = buffers.image.data_ptr(), buffers.grads.data_ptr()
    known, key = buffers.states.bound, (run.first.index, run.last.index, wide, addresses)
    tensors = known.get(key)
    if tensors is None:
        tensors = bind(run, buffers, wide=wide, factor=None)
        if tensors is None:
            return None
        if len(known) >= _MOST_BOUND:  # a run may end elsewhere in each step: some parameters have no gradients
            known.clear()
        known[key] = tensors
    return tensors if factor is None else tensors.scaled_by(factor)


def bind(run: Run, buffers: Buffers, *, wide: bool, factor: torch.Tensor | None, done: int = 0) -> AdamTensors | None:
    """The part of ``run`` that lies in the chunk, from state ``done`` on; None if it has none."""
    first, chunk = run.first, buffers.states.chunk
    states = chunk.states
    start = max(first.state_at, states.start, done)
    count = min(first.state_at + run.count, states.stop) - start
    if count <= 0:
        return None
    skipped = start - first.state_at

    def part(buffer: torch.Tensor, at: int, dtype: torch.dtype) -> torch.Tensor:
        at += skipped * dtype.itemsize
        return buffer[at : at + count * dtype.itemsize].view(dtype)

    grad_at = (first.wide_at if wide else first.grad_at) - buffers.grads_at
    split, master_at = SPLIT_DTYPE.get(first.dtype), first.master_at - chunk.masters.start
    return AdamTensors(
        weight=part(buffers.image, first.at, first.dtype),
        master=part(buffers.states.masters, master_at, split) if split is not None else None,
        exp_avg=buffers.states.exp_avg[start - states.start :][:count],
        exp_avg_sq=buffers.states.exp_avg_sq[start - states.start :][:count],
        grad=part(buffers.grads, grad_at, torch.float32 if wide else first.dtype),
        grad_factor=factor,
    )
