"""From host memory to the user's device: where a batch is read to, how it gets across, and when memory is used again.

What travels at once is a group of batches (groups.py), often of one. On the CPU it is read into what the user gets, and
there is nothing to deliver.

On a GPU, names first. A *slot* is page-locked memory for one group, all fields. A *parcel* is the device memory of one
group: fresh tensors from torch's allocator, taken on the stream that the user computes on. Two rules hold:

- The lane's copy into a parcel waits for what the user's stream was doing when the parcel was allocated: until then the
  bytes may belong to a tensor that queued work still reads. Parcels are therefore allocated ahead: by the time a copy
  is queued, that moment lies a whole step back, and the copy runs beside the step before it is needed.
- The user's stream waits for the copy before the tensors are handed out. From then on they are like any tensor that was
  made on that stream, and torch frees them in its order. If the user has changed streams in between, torch is told.

A slot is filled again when the event behind its copy has passed. The host never waits for that while another slot is
free, so nothing in a steady loop stops the thread that launches work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from ...core.errors import OutOfBudget
from ...core.sizes import round_up
from ...core.tags import Tag, Tier
from ...memory.books.ledger import Ledger, Reservation
from ...memory.host.arena import HostArena
from ...memory.host.pinning import page_lock_for
from ...memory.lanes.build import Lanes, open_lanes
from ...memory.lanes.lane import Delay, Event
from ..source import Field
from .buffers import Buffers, Room

_GRAIN = 512  # of the fields in a slot: what copy engines like best


@dataclass(slots=True)
class HostGroup:
    """Host memory for ``count`` rows: for each field a tensor, of bytes or of the field's kind, and its address."""

    count: int
    fields: list[torch.Tensor]
    addresses: list[int]


class Delivery(ABC):
    """``ahead``: how many groups to send before they are asked for."""

    ahead: int

    @abstractmethod
    def grow(self, depth: int) -> bool:
        """Make room for ``depth`` groups in host memory; False, with nothing changed, if the budget refuses."""

    @abstractmethod
    def reset(self) -> None:
        """Nothing is being read or sent any more: what an interrupt has left without an owner is free again."""

    @abstractmethod
    def take(self, count: int, *, block: bool) -> HostGroup | None:
        """Memory to read ``count`` rows to. None if all of it is in use, unless ``block``: then wait for some."""

    @abstractmethod
    def drop(self, group: HostGroup) -> None:
        """A group that nobody will send. Nothing may write to it any more."""

    @abstractmethod
    def send(self, group: HostGroup) -> object:
        """Let a group that was read go its way; returns at once. What comes back is for ``give``, in the same order."""

    @abstractmethod
    def give(self, sent: object) -> list[list[torch.Tensor]]:
        """The group's batches, each for ``own`` when its turn comes."""

    @abstractmethod
    def forget(self, sent: object) -> None:
        """Instead of ``give``, for a group that nobody wants any more."""

    @abstractmethod
    def own(self, sent: object, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        """A batch of the group as the user's own memory, ready for the stream that is current now."""

    @abstractmethod
    def prepare(self) -> None:
        """Called after something was given, before the user computes with it."""

    @abstractmethod
    def close(self) -> None:
        """Return the memory. Tensors that were given stay valid. Safe to call twice."""

    @property
    @abstractmethod
    def ring_bytes(self) -> int:
        """Host memory that is charged."""


@dataclass(slots=True)
class _CpuGroup(HostGroup):
    rooms: list[Room]


class CpuDelivery(Delivery):
    """The user gets the memory that was read to."""

    ahead = 0

    def __init__(self, fields: Sequence[Field], batch_rows: int, ledger: Ledger, *, batches: int) -> None:
        self._ledger = ledger
        self._group_bytes = batches * batch_rows * sum(field.row_bytes for field in fields)
        self._buffers = [Buffers(field, batch_rows, batches) for field in fields]
        self._reservations: list[Reservation] = []

    def grow(self, depth: int) -> bool:
        # One more than are on their way: the user's last batch comes back just after the next was asked for.
        more = (depth + 1) * self._group_bytes - self.ring_bytes
        try:
            self._reservations.append(self._ledger.reserve(Tier.HOST, Tag.DATA, max(0, more)))
        except OutOfBudget:
            return False
        for buffers in self._buffers:
            buffers.most = depth + 2
        return True

    def reset(self) -> None:
        pass

    def take(self, count: int, *, block: bool) -> HostGroup | None:  # noqa: ARG002
        with torch.inference_mode(False):  # what is read ahead may be used outside of the mode that it is read in
            rooms = [buffers.take(count) for buffers in self._buffers]
        return _CpuGroup(count, [room.whole for room in rooms], [room.whole.data_ptr() for room in rooms], rooms)

    def drop(self, group: HostGroup) -> None:
        assert isinstance(group, _CpuGroup)
        group.fields.clear()
        group.rooms.clear()

    def send(self, group: HostGroup) -> object:
        return group

    def give(self, sent: object) -> list[list[torch.Tensor]]:
        assert isinstance(sent, _CpuGroup)
        with torch.inference_mode(False):
            parts = [buffers.batches(room) for buffers, room in zip(self._buffers, sent.rooms, strict=True)]
        self.drop(sent)  # what is left of it is the user's
        return [list(batch) for batch in zip(*parts, strict=True)]

    def forget(self, sent: object) -> None:
        assert isinstance(sent, _CpuGroup)
        self.drop(sent)

    def own(self, sent: object, batch: list[torch.Tensor]) -> list[torch.Tensor]:  # noqa: ARG002
        return batch

    def prepare(self) -> None:
        pass

    def close(self) -> None:
        for buffers in self._buffers:
            buffers.clear()
        while self._reservations:
            self._reservations.pop().release()

    @property
    def ring_bytes(self) -> int:
        return sum(reservation.bytes for reservation in self._reservations)


@dataclass(slots=True)
class _SlotGroup(HostGroup):
    slot: int


@dataclass(slots=True)
class _Parcel:
    """Device memory for one group, and the moment of the user's stream from which on it may be written."""

    tensors: list[torch.Tensor]
    place: Hashable  # the stream
    allocated: Event


@dataclass(slots=True)
class _Sent:
    parcel: _Parcel
    arrived: Event
    followers: set[Hashable] = field(default_factory=set)  # streams that wait for it


class _Slot:
    """Page-locked memory for one group; ``copied`` is the event behind the last copy from it."""

    def __init__(self, fields: list[torch.Tensor]) -> None:
        self.fields = fields
        self.copied: Event | None = None


class LaneDelivery(Delivery):
    """Slots, the lane, parcels."""

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
        """``batches``: of a group, at most. ``delay`` is for tests, as in ``open_lanes``: with one, a CPU can play the
        device."""
        self.ahead, self._delay = ahead, delay
        self._device, self._fields, self._ledger = device, fields, ledger
        self._batch_rows, self._group_rows = batch_rows, batches * batch_rows
        self._slot_bytes = sum(round_up(self._group_rows * field.row_bytes, _GRAIN) for field in fields)
        self._page_lock = page_lock_for(device)
        self._arenas: list[HostArena] = []
        self._slots: list[_Slot] = []
        self._free: deque[int] = deque()  # slots, the one whose copy was queued first in front
        self._lanes: Lanes | None = None
        self._parcels: deque[_Parcel] = deque()

    def grow(self, depth: int) -> bool:
        more = depth + self.ahead + 1 - len(self._slots)
        if more <= 0:
            return True
        try:
            arena = HostArena(more * self._slot_bytes, ledger=self._ledger, tag=Tag.DATA, page_lock=self._page_lock)
        except OutOfBudget:
            return False
        if self._arenas and arena.pinned != self._arenas[0].pinned:  # the lane is made for one kind
            arena.close()
            return False
        self._arenas.append(arena)
        if self._lanes is None:
            self._lanes = open_lanes(self._device, home=arena, ledger=self._ledger, delay=self._delay)
        for _ in range(more):
            self._free.append(len(self._slots))
            sizes = [self._group_rows * field.row_bytes for field in self._fields]
            self._slots.append(_Slot([arena.tensor((size,), torch.uint8, alignment=_GRAIN) for size in sizes]))
        return True

    def reset(self) -> None:
        self._free = deque(dict.fromkeys([*self._free, *range(len(self._slots))]))  # each once

    def take(self, count: int, *, block: bool) -> HostGroup | None:
        if not self._free:
            assert not block, "a slot is free when nothing is on its way"
            return None
        copied = self._slots[self._free[0]].copied
        if copied is not None:
            if not block and not copied.done():
                return None
            copied.synchronize()
        number = self._free.popleft()
        whole = zip(self._slots[number].fields, self._fields, strict=True)
        fields = [memory[: count * field.row_bytes] for memory, field in whole]
        return _SlotGroup(count, fields, [tensor.data_ptr() for tensor in fields], number)

    def drop(self, group: HostGroup) -> None:
        assert isinstance(group, _SlotGroup)
        self._free.append(group.slot)

    def send(self, group: HostGroup) -> object:
        assert isinstance(group, _SlotGroup)
        assert self._lanes is not None
        lane = self._lanes.load
        is_short = group.count < self._group_rows
        if not self._parcels or (is_short and not self._is_copied):  # what users keep has just its size
            parcel = self._allocate(group.count)
        else:
            parcel = self._parcels.popleft()
            if is_short:
                parcel.tensors = [tensor[: group.count] for tensor in parcel.tensors]
        lane.wait(parcel.allocated)
        try:
            for target, source in zip(parcel.tensors, as_fields(group, self._fields), strict=True):
                lane.copy(target, source, Tag.DATA)
        except BaseException:
            self._lanes.compute.wait(lane.record())  # a part may be on its way, and the parcel is freed now
            raise
        arrived = lane.record()
        self._slots[group.slot].copied = arrived
        self._free.append(group.slot)
        return _Sent(parcel, arrived)

    def give(self, sent: object) -> list[list[torch.Tensor]]:
        assert isinstance(sent, _Sent)
        self._follow(sent)
        if not self._is_copied:
            return [sent.parcel.tensors]
        parts = [tensor.split(self._batch_rows) for tensor in sent.parcel.tensors]
        return [list(batch) for batch in zip(*parts, strict=True)]

    def forget(self, sent: object) -> None:
        assert isinstance(sent, _Sent)
        self._follow(sent)  # so that the user's stream frees it behind its copy

    def own(self, sent: object, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        if not self._is_copied:
            return batch
        assert isinstance(sent, _Sent)
        self._follow(sent)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return [tensor.clone() for tensor in batch]
        return [tensor.clone() for tensor in batch]

    @property
    def _is_copied(self) -> bool:
        """Whether batches are copied out of their group, so that they share no memory."""
        return self._group_rows > self._batch_rows

    def _follow(self, sent: _Sent) -> None:
        """Let the stream that is current now wait for the group, which may have been given on another."""
        assert self._lanes is not None
        now = self._lanes.compute.place()
        if now in sent.followers:
            return
        self._lanes.compute.wait(sent.arrived)
        sent.followers.add(now)
        if isinstance(now, torch.cuda.Stream) and now != sent.parcel.place:
            for tensor in sent.parcel.tensors:
                tensor.record_stream(now)

    def prepare(self) -> None:
        while len(self._parcels) < self.ahead:
            self._parcels.append(self._allocate(self._group_rows))

    def close(self) -> None:
        lanes, self._lanes = self._lanes, None
        if lanes is not None:
            lanes.close()  # to its end: parcels on their way are about to be freed, in the order of another stream
        self._parcels.clear()
        self._slots.clear()
        self._free.clear()
        while self._arenas:
            self._arenas.pop().close()

    @property
    def ring_bytes(self) -> int:
        return sum(arena.capacity_bytes for arena in self._arenas)

    def _allocate(self, count: int) -> _Parcel:
        assert self._lanes is not None
        with torch.inference_mode(False):
            tensors = [
                torch.empty((count, *field.shape), dtype=field.dtype, device=self._device) for field in self._fields
            ]
        return _Parcel(tensors, self._lanes.compute.place(), self._lanes.compute.record())


def as_fields(group: HostGroup, fields: Sequence[Field]) -> list[torch.Tensor]:
    """The bytes of a group as what they are."""
    return [
        memory.view(field.dtype).view(group.count, *field.shape)
        for memory, field in zip(group.fields, fields, strict=True)
    ]


def open_delivery(
    device: torch.device, fields: Sequence[Field], batch_rows: int, ledger: Ledger, *, batches: int, ahead: int
) -> Delivery:
    """What brings groups of up to ``batches`` batches to ``device``. Takes no memory before ``grow``."""
    if device.type == "cpu":
        return CpuDelivery(fields, batch_rows, ledger, batches=batches)
    return LaneDelivery(device, fields, batch_rows, ledger, batches=batches, ahead=ahead)
