"""Brings groups of batches from host memory to the user's device.

A batch of any size costs the calling thread some tenths of a millisecond: it computes addresses, wakes threads, and
for a GPU queues copies and events. A small model's whole step takes a few. So the loader reads and sends consecutive
small batches as one *group*.

On the CPU the reader writes into the memory that the user gets, and there is nothing to deliver: a copy would cost as
much as reading. Each batch has its own storage over a part of the group's memory, which is used again when all of them
are gone.

On a GPU, a *slot* is page-locked memory for one group, all fields. *Device tensors* are the memory of one group there,
fresh from torch's allocator on the user's stream. Two rules hold:

- A copy waits for the work that was queued on the user's stream when its target was allocated: until then the bytes
  may belong to a tensor that queued work still reads. So targets are allocated ahead: when a copy is queued, that work
  lies a whole step back, and the copy overlaps with the step before its use.
- The user's stream waits for the copy before the user gets the tensors. From then on they are like any tensor made on
  that stream, and torch frees them in its order. If user code has changed streams in between, they are recorded there.

A slot is filled again after its copy's event. The host waits for that only if no other slot is free, so a steady loop
never stops the thread that launches work. Each batch of a larger group is copied out of it, in microseconds: the batch
is the user's memory, and the group's memory is free after its last batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ...core.errors import OutOfBudget
from ...core.sizes import MiB, round_up
from ...core.tags import Tag, Tier
from ...memory.books.ledger import Ledger, Reservation
from ...memory.host.arena import HostArena
from ...memory.host.pinning import page_lock_for
from ...memory.lanes.build import Lanes, open_lanes
from ...memory.lanes.lane import Delay, Event
from ..source import Field
from .buffers import LINE, Buffers, Pages

_ALIGNMENT = 512  # of the fields in a slot; copy engines are fastest with it

# Limits of a group. On a GPU up to two exist at a time; on the CPU a batch that the user keeps holds the whole group.
_MAX_BYTES = {"cpu": 8 * MiB, "cuda": 32 * MiB}
_MAX_BATCHES = {"cpu": 8, "cuda": 32}
_SHARE = 32  # a group takes at most this fraction of the free memory
_ROW_BYTES = 56  # reading takes as much for each row of a field, beside the row


def batches_at_once(
    device: torch.device, *, batch_rows: int, fields: Sequence[Field], most_rows: int, free_bytes: int
) -> int:
    """The number of batches in a group. ``most_rows``: the limit of a group."""
    kind = "cpu" if device.type == "cpu" else "cuda"
    if kind == "cpu" and any(batch_rows * field.row_bytes % LINE for field in fields):
        return 1  # only the first batch would be aligned
    batch_bytes = batch_rows * sum(field.row_bytes + _ROW_BYTES for field in fields)
    group_bytes = min(_MAX_BYTES[kind], free_bytes // _SHARE)
    return max(1, min(_MAX_BATCHES[kind], most_rows // batch_rows, group_bytes // batch_bytes))


@dataclass(slots=True)
class HostGroup:
    """Host memory for ``count`` rows: for each field a tensor, of bytes or of the field's dtype."""

    count: int
    fields: list[torch.Tensor]


@dataclass(slots=True)
class _CpuGroup(HostGroup):
    pages: list[Pages]  # of each field


class CpuDelivery:
    """Gives the user the memory that the reader wrote to."""

    ahead = 0  # how many groups to send before their batches are requested

    def __init__(self, fields: Sequence[Field], batch_rows: int, ledger: Ledger, *, batches: int) -> None:
        self._ledger, self._batch_rows = ledger, batch_rows
        self._group_bytes = batches * batch_rows * sum(field.row_bytes for field in fields)
        self._buffers = [Buffers(field, batch_rows, batches) for field in fields]
        self._reservations: list[Reservation] = []

    def grow(self, depth: int) -> bool:
        """Make room for ``depth`` groups in host memory; returns False and changes nothing if the budget refuses."""
        # One more than are being read: the user drops the last batch just after requesting the next.
        more = (depth + 1) * self._group_bytes - sum(reservation.bytes for reservation in self._reservations)
        try:
            self._reservations.append(self._ledger.reserve(Tier.HOST, Tag.DATA, max(0, more)))
        except OutOfBudget:
            return False
        for buffers in self._buffers:
            buffers.most = depth + 2
        return True

    def take(self, count: int, *, block: bool) -> _CpuGroup:  # noqa: ARG002
        """Memory for ``count`` rows. If all of it is in use: waits with ``block``, else returns None."""
        pages = [buffers.take() for buffers in self._buffers]
        with torch.inference_mode(False):  # user code may use prefetched tensors outside the present mode
            return _CpuGroup(count, self._tensors(pages, 0, count), pages)

    def drop(self, group: _CpuGroup) -> None:
        """Take back a group instead of giving it, sent or not. The reader does not write to it any more."""
        group.fields.clear()  # the reader may hold the lists a little longer
        group.pages.clear()

    def send(self, group: _CpuGroup) -> None:
        """Start sending a group that has been read; returns at once. Groups are given in the same order."""

    def give(self, group: _CpuGroup) -> Iterator[list[torch.Tensor]]:
        """The batches of a group that was sent: the user's own memory, ready for the stream that is current at each."""
        if group.count <= self._batch_rows:
            batches = deque([list(group.fields)])
        else:
            firsts = range(0, group.count, self._batch_rows)
            ends = (*firsts[1:], group.count)
            with torch.inference_mode(False):  # once for all: that takes as long as the tensors of a batch
                batches = deque(
                    self._tensors(group.pages, first, end - first) for first, end in zip(firsts, ends, strict=True)
                )
        self.drop(group)
        while batches:
            yield batches.popleft()

    def _tensors(self, pages: Sequence[Pages], first: int, rows: int) -> list[torch.Tensor]:
        return [buffers.tensor(some, first, rows) for buffers, some in zip(self._buffers, pages, strict=True)]

    def prepare(self) -> None:
        """Allocate for the next groups. Called after a batch is taken, before the user computes with it."""

    def close(self) -> None:
        """Return the memory. Tensors that the user got remain valid. Idempotent."""
        for buffers in self._buffers:
            buffers.clear()
        while self._reservations:
            self._reservations.pop().release()


@dataclass(slots=True, eq=False)
class _Slot:
    """Page-locked memory for one group; ``copied``: the event after the last copy from it."""

    fields: list[torch.Tensor]
    copied: Event | None = None


@dataclass(slots=True)
class _Target:
    """Device memory for one group."""

    tensors: list[torch.Tensor]
    place: Hashable  # the user's stream when it was allocated
    allocated: Event  # on that stream: from then on copies may write to it
    arrived: Event | None = None  # the copies have ended
    followers: set[Hashable] = field(default_factory=set)  # streams that wait for ``arrived``


@dataclass(slots=True)
class _LaneGroup(HostGroup):
    slot: _Slot
    target: _Target | None = None  # where it was sent


class LaneDelivery:
    """As CpuDelivery, but copies slots to device tensors on a lane."""

    def __init__(
        self,
        device: torch.device,
        fields: Sequence[Field],
        batch_rows: int,
        ledger: Ledger,
        *,
        batches: int,
        ahead: int,
        delay: Delay | None = None,
    ) -> None:
        """``batches``: the most in a group. ``delay`` is for tests, as in ``open_lanes``: it makes a CPU the device."""
        self.ahead, self._delay = ahead, delay
        self._device, self._fields, self._ledger = device, fields, ledger
        self._batch_rows, self._group_rows = batch_rows, batches * batch_rows
        self._is_copied = batches > 1  # batches are copied out of a group of several
        self._field_bytes = [self._group_rows * field.row_bytes for field in fields]
        self._page_lock = page_lock_for(device)
        self._arenas: list[HostArena] = []
        self._slots: list[_Slot] = []
        self._free: deque[_Slot] = deque()  # by the order of their copies
        self._lanes: Lanes | None = None
        self._allocated: deque[_Target] = deque()

    def grow(self, depth: int) -> bool:
        more = depth + self.ahead + 1 - len(self._slots)
        if more <= 0:
            return True
        slot_bytes = sum(round_up(size, _ALIGNMENT) for size in self._field_bytes)
        try:
            arena = HostArena(more * slot_bytes, ledger=self._ledger, tag=Tag.DATA, page_lock=self._page_lock)
        except OutOfBudget:
            return False
        if self._arenas and arena.pinned != self._arenas[0].pinned:  # a lane takes one kind of memory
            arena.close()
            return False
        self._arenas.append(arena)
        if self._lanes is None:
            self._lanes = open_lanes(self._device, home=arena, ledger=self._ledger, delay=self._delay)
        for _ in range(more):
            fields = [arena.tensor((size,), torch.uint8, alignment=_ALIGNMENT) for size in self._field_bytes]
            self._slots.append(_Slot(fields))
            self._free.append(self._slots[-1])
        return True

    def take(self, count: int, *, block: bool) -> _LaneGroup | None:
        if not self._free:
            assert not block, "a slot is free if nothing is being read or sent"
            return None
        copied = self._free[0].copied
        if copied is not None:
            if not block and not copied.done():
                return None
            copied.synchronize()
        slot = self._free.popleft()
        whole = zip(slot.fields, self._fields, strict=True)
        return _LaneGroup(count, [memory[: count * field.row_bytes] for memory, field in whole], slot)

    def drop(self, group: _LaneGroup) -> None:
        if group.target is None:
            self._free.append(group.slot)
        else:
            self._follow(group.target)  # the user's stream then frees the memory after the copy

    def send(self, group: _LaneGroup) -> None:
        assert self._lanes is not None
        lane = self._lanes.load
        is_short = group.count < self._group_rows
        if not self._allocated or (is_short and not self._is_copied):  # a batch that users keep has its exact size
            target = self._allocate(group.count)
        else:
            target = self._allocated.popleft()
            if is_short:
                target.tensors = [tensor[: group.count] for tensor in target.tensors]
        lane.wait(target.allocated)
        try:
            for tensor, source in zip(target.tensors, as_fields(group, self._fields), strict=True):
                lane.copy(tensor, source, Tag.DATA)
        except BaseException:
            self._lanes.compute.wait(lane.record())  # some copies may run, and the target is freed now
            raise
        group.slot.copied = target.arrived = lane.record()
        group.target = target
        self._free.append(group.slot)

    def give(self, group: _LaneGroup) -> Iterator[list[torch.Tensor]]:
        assert group.target is not None
        if not self._is_copied:
            yield self._follow(group.target)
            return
        for first in range(0, group.count, self._batch_rows):
            yield self._copied(group.target, first)

    def _copied(self, target: _Target, first: int) -> list[torch.Tensor]:
        """A copy of the batch that begins with row ``first``."""
        tensors = [tensor[first : first + self._batch_rows] for tensor in self._follow(target)]
        if not torch.is_inference_mode_enabled():
            return [tensor.clone() for tensor in tensors]
        with torch.inference_mode(False):
            return [tensor.clone() for tensor in tensors]

    def _follow(self, target: _Target) -> list[torch.Tensor]:
        """Make the current stream wait for the copies, and return the tensors."""
        assert self._lanes is not None
        assert target.arrived is not None
        now = self._lanes.compute.place()
        if now not in target.followers:
            self._lanes.compute.wait(target.arrived)
            target.followers.add(now)
            if isinstance(now, torch.cuda.Stream) and now != target.place:
                for tensor in target.tensors:
                    tensor.record_stream(now)
        return target.tensors

    def prepare(self) -> None:
        while len(self._allocated) < self.ahead:
            self._allocated.append(self._allocate(self._group_rows))

    def close(self) -> None:
        lanes, self._lanes = self._lanes, None
        if lanes is not None:
            lanes.close()  # waits for copies: their targets are freed next, in the order of another stream
        self._allocated.clear()
        self._slots.clear()
        self._free.clear()
        while self._arenas:
            self._arenas.pop().close()

    def _allocate(self, count: int) -> _Target:
        assert self._lanes is not None
        with torch.inference_mode(False):
            tensors = [
                torch.empty((count, *field.shape), dtype=field.dtype, device=self._device) for field in self._fields
            ]
        return _Target(tensors, self._lanes.compute.place(), self._lanes.compute.record())


def as_fields(group: HostGroup, fields: Sequence[Field]) -> list[torch.Tensor]:
    """View the bytes of a group in the dtypes and shapes of the fields."""
    return [
        memory.view(field.dtype).view(group.count, *field.shape)
        for memory, field in zip(group.fields, fields, strict=True)
    ]


def open_delivery(
    device: torch.device, fields: Sequence[Field], batch_rows: int, ledger: Ledger, *, batches: int, ahead: int
) -> CpuDelivery | LaneDelivery:
    """The delivery of groups of up to ``batches`` batches to ``device``. Takes no memory before ``grow``."""
    if device.type == "cpu":
        return CpuDelivery(fields, batch_rows, ledger, batches=batches)
    return LaneDelivery(device, fields, batch_rows, ledger, batches=batches, ahead=ahead)
