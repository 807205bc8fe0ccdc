"""Brings groups of batches (groups.py) from host memory to the user's device.

On the CPU the reader writes into the memory that the user gets, and there is nothing to deliver.

On a GPU, a *slot* is page-locked memory for one group, all fields. *Device tensors* are the memory of one group there,
fresh from torch's allocator on the user's stream. Two rules hold:

- A copy waits for the work that was queued on the user's stream when its target was allocated: until then the bytes
  may belong to a tensor that queued work still reads. So targets are allocated ahead: when a copy is queued, that work
  lies a whole step back, and the copy overlaps with the step before its use.
- The user's stream waits for the copy before the user gets the tensors. From then on they are like any tensor made on
  that stream, and torch frees them in its order. If user code has changed streams in between, they are recorded there.

A slot is filled again after its copy's event. The host waits for that only if no other slot is free, so a steady loop
never stops the thread that launches work.
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

_ALIGNMENT = 512  # of the fields in a slot; copy engines are fastest with it


@dataclass(slots=True)
class HostGroup:
    """Host memory for ``count`` rows: for each field a tensor, of bytes or of the field's dtype, and its address."""

    count: int
    fields: list[torch.Tensor]
    addresses: list[int]


class Delivery(ABC):
    """``ahead``: how many groups to send before their batches are requested."""

    ahead: int

    @abstractmethod
    def grow(self, depth: int) -> bool:
        """Make room for ``depth`` groups in host memory; returns False and changes nothing if the budget refuses."""

    @abstractmethod
    def reset(self) -> None:
        """Reclaim memory that an interrupt left without an owner. Nothing is being read or sent."""

    @abstractmethod
    def take(self, count: int, *, block: bool) -> HostGroup | None:
        """Memory for ``count`` rows. If all of it is in use: waits with ``block``, else returns None."""

    @abstractmethod
    def drop(self, group: HostGroup) -> None:
        """Take back a group that will not be sent. Nothing writes to it any more."""

    @abstractmethod
    def send(self, group: HostGroup) -> object:
        """Start sending a group that has been read; returns at once. Pass the result to ``give``, in the same order."""

    @abstractmethod
    def give(self, sent: object) -> list[list[torch.Tensor]]:
        """The group's batches; the caller passes each to ``own`` before it gives it to the user."""

    @abstractmethod
    def forget(self, sent: object) -> None:
        """Discard a group that was sent, instead of ``give``."""

    @abstractmethod
    def own(self, sent: object, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        """A batch of the group as the user's own memory, ready for the current stream."""

    @abstractmethod
    def prepare(self) -> None:
        """Allocate for the next groups. Called after a batch is taken, before the user computes with it."""

    @abstractmethod
    def close(self) -> None:
        """Return the memory. Tensors that the user got remain valid. Idempotent."""


@dataclass(slots=True)
class _CpuGroup(HostGroup):
    rooms: list[Room]


class CpuDelivery(Delivery):
    """Gives the user the memory that the reader wrote to."""

    ahead = 0

    def __init__(self, fields: Sequence[Field], batch_rows: int, ledger: Ledger, *, batches: int) -> None:
        self._ledger = ledger
        self._group_bytes = batches * batch_rows * sum(field.row_bytes for field in fields)
        self._buffers = [Buffers(field, batch_rows, batches) for field in fields]
        self._reservations: list[Reservation] = []

    def grow(self, depth: int) -> bool:
        # One more than are being read: the user drops the last batch just after requesting the next.
        more = (depth + 1) * self._group_bytes - sum(reservation.bytes for reservation in self._reservations)
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
        with torch.inference_mode(False):  # user code may use prefetched tensors outside the present mode
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
        self.drop(sent)
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


@dataclass(slots=True)
class _SlotGroup(HostGroup):
    slot: int


@dataclass(slots=True)
class _DeviceTensors:
    """Device memory for one group, and the event on the user's stream after which copies may write to it."""

    tensors: list[torch.Tensor]
    place: Hashable  # the stream
    allocated: Event


@dataclass(slots=True)
class _Sent:
    target: _DeviceTensors
    arrived: Event
    followers: set[Hashable] = field(default_factory=set)  # streams that wait for ``arrived``


class _Slot:
    """Page-locked memory for one group; ``copied``: the event after the last copy from it."""

    def __init__(self, fields: list[torch.Tensor]) -> None:
        self.fields = fields
        self.copied: Event | None = None


class LaneDelivery(Delivery):
    """Copies slots to device tensors on a lane."""

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
        self._slot_bytes = sum(round_up(self._group_rows * field.row_bytes, _ALIGNMENT) for field in fields)
        self._page_lock = page_lock_for(device)
        self._arenas: list[HostArena] = []
        self._slots: list[_Slot] = []
        self._free: deque[int] = deque()  # slots, by the order of their copies
        self._lanes: Lanes | None = None
        self._allocated: deque[_DeviceTensors] = deque()

    def grow(self, depth: int) -> bool:
        more = depth + self.ahead + 1 - len(self._slots)
        if more <= 0:
            return True
        try:
            arena = HostArena(more * self._slot_bytes, ledger=self._ledger, tag=Tag.DATA, page_lock=self._page_lock)
        except OutOfBudget:
            return False
        if self._arenas and arena.pinned != self._arenas[0].pinned:  # a lane takes one kind of memory
            arena.close()
            return False
        self._arenas.append(arena)
        if self._lanes is None:
            self._lanes = open_lanes(self._device, home=arena, ledger=self._ledger, delay=self._delay)
        for _ in range(more):
            self._free.append(len(self._slots))
            sizes = [self._group_rows * field.row_bytes for field in self._fields]
            self._slots.append(_Slot([arena.tensor((size,), torch.uint8, alignment=_ALIGNMENT) for size in sizes]))
        return True

    def reset(self) -> None:
        self._free = deque(dict.fromkeys([*self._free, *range(len(self._slots))]))  # each once

    def take(self, count: int, *, block: bool) -> HostGroup | None:
        if not self._free:
            assert not block, "a slot is free if nothing is being read or sent"
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
        arrived = lane.record()
        self._slots[group.slot].copied = arrived
        self._free.append(group.slot)
        return _Sent(target, arrived)

    def give(self, sent: object) -> list[list[torch.Tensor]]:
        assert isinstance(sent, _Sent)
        self._follow(sent)
        if not self._is_copied:
            return [sent.target.tensors]
        parts = [tensor.split(self._batch_rows) for tensor in sent.target.tensors]
        return [list(batch) for batch in zip(*parts, strict=True)]

    def forget(self, sent: object) -> None:
        assert isinstance(sent, _Sent)
        self._follow(sent)  # the user's stream then frees the memory after the copy

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
        """Whether batches are copied out of their group, because it has several."""
        return self._group_rows > self._batch_rows

    def _follow(self, sent: _Sent) -> None:
        """Make the current stream wait for the group, which may have been given on another."""
        assert self._lanes is not None
        now = self._lanes.compute.place()
        if now in sent.followers:
            return
        self._lanes.compute.wait(sent.arrived)
        sent.followers.add(now)
        if isinstance(now, torch.cuda.Stream) and now != sent.target.place:
            for tensor in sent.target.tensors:
                tensor.record_stream(now)

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

    def _allocate(self, count: int) -> _DeviceTensors:
        assert self._lanes is not None
        with torch.inference_mode(False):
            tensors = [
                torch.empty((count, *field.shape), dtype=field.dtype, device=self._device) for field in self._fields
            ]
        return _DeviceTensors(tensors, self._lanes.compute.place(), self._lanes.compute.record())


def as_fields(group: HostGroup, fields: Sequence[Field]) -> list[torch.Tensor]:
    """View the bytes of a group in the dtypes and shapes of the fields."""
    return [
        memory.view(field.dtype).view(group.count, *field.shape)
        for memory, field in zip(group.fields, fields, strict=True)
    ]


def open_delivery(
    device: torch.device, fields: Sequence[Field], batch_rows: int, ledger: Ledger, *, batches: int, ahead: int
) -> Delivery:
    """The delivery of groups of up to ``batches`` batches to ``device``. Takes no memory before ``grow``."""
    if device.type == "cpu":
        return CpuDelivery(fields, batch_rows, ledger, batches=batches)
    return LaneDelivery(device, fields, batch_rows, ledger, batches=batches, ahead=ahead)
