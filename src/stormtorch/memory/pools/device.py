"""Device memory that is taken once: single blocks, and rings of equal slots whose reuse is gated by events.

Slots make the bound hard. The host may run whole steps ahead of the GPU; with memory from torch's allocator each load
that it enqueues would take fresh bytes, and `record_stream` would return them at some later time. A slot exists
already, and the lane that fills it again waits, on the GPU, for the event of its last use.

A slot is in one of three states: *free* (its last use may still be running; the bytes are reusable behind
``last_use``), *held* (acquired by somebody), *closed* with its ring (the memory is torch's again).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from ...core.errors import LaneError, OutOfBudget
from ...core.sizes import format_bytes, parse_bytes, round_up
from ...core.tags import Tag, Tier
from ..books.ledger import Ledger
from ..lanes.lane import Event, Lane

_GRAIN = 512  # torch's CUDA allocator rounds to this; also more than any kernel's alignment


class DeviceBlock:
    """Bytes on the device for as long as the block is open, charged before they are allocated."""

    def __init__(self, device: torch.device, size: int, *, ledger: Ledger, tag: Tag) -> None:
        self.size = size = parse_bytes(size)
        self._reservation = ledger.reserve(Tier.DEVICE, tag, round_up(size, _GRAIN))
        try:
            with torch.inference_mode(False):  # or lanes could not write it
                self._bytes: torch.Tensor | None = torch.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            self._reservation.release()
            if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
                raise  # the CPU's allocator has no class of its own for what its message says
            budget = ledger.budgets[Tier.DEVICE]
            raise OutOfBudget(
                f"Cannot allocate {format_bytes(size)} on the device for {tag.name}",
                f"within the budget of {format_bytes(budget.limit_bytes)}, but the device itself is full",
                f"The limit is the device's memory, not {budget.given}.",
                "Lower vram, or end other programs on the GPU.",
            ) from error
        except BaseException:
            self._reservation.release()
            raise

    def tensor(
        self, dtype: torch.dtype = torch.uint8, shape: Iterable[int] | None = None, *, offset: int = 0
    ) -> torch.Tensor:
        """A view that starts ``offset`` bytes into the block; without ``shape`` it spans the rest."""
        assert self._bytes is not None, "the block was closed"
        if shape is None:
            return self._bytes[offset:].view(dtype)
        shape = torch.Size(shape)
        return self._bytes[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def close(self) -> None:
        """Return the memory to torch and the charge to the ledger.

        All work on it must have ended. Safe to call twice.
        """
        self._bytes = None
        self._reservation.release()


def bytes_for_graph(size: int, device: torch.device) -> torch.Tensor:
    """Bytes of torch's own allocator, for what belongs to the user's graph again: like every activation on the device,
    they are not in the ledger."""
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device=device)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of ``tensor``, which is shared, not copied."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class Slot:
    """One of a ring's equal pieces.

    ``bytes`` may be written behind ``last_use``, for which ``acquire`` made the lane wait.
    """

    __slots__ = ("_ring", "bytes", "index", "last_use")

    def __init__(self, ring: SlotRing, index: int, data: torch.Tensor, last_use: Event) -> None:
        self._ring = ring
        self.index, self.bytes, self.last_use = index, data, last_use

    def tensor(self, dtype: torch.dtype, shape: Iterable[int], *, offset: int = 0) -> torch.Tensor:
        """A view that starts ``offset`` bytes into the slot."""
        shape = torch.Size(shape)
        return self.bytes[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def release(self, last_use: Event) -> None:
        """Make the slot free again behind ``last_use``.

        Returns at once; nothing waits until the slot is filled anew.
        """
        self._ring._release(self, last_use)


class SlotRing:
    """``count`` slots of ``slot_bytes`` each, allocated now. Used from one thread, or under the owner's lock.

    ``poison`` names a lane that overwrites every released slot with NaN, behind its last use: a reader that did not
    wait, or that was not waited for, then gives a wrong number at once instead of a rare one. For tests.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        count: int,
        slot_bytes: int,
        ledger: Ledger,
        tag: Tag,
        compute: Lane,
        poison: Lane | None = None,
    ) -> None:
        self.slot_bytes = round_up(parse_bytes(slot_bytes), _GRAIN)
        self._block = DeviceBlock(device, count * self.slot_bytes, ledger=ledger, tag=tag)
        self._poison = poison
        # The allocator may have given us memory that queued work of compute still uses: no lane may run ahead of that.
        fresh = compute.record()
        data = self._block.tensor()
        self.slots = tuple(
            Slot(self, i, data[i * self.slot_bytes : (i + 1) * self.slot_bytes], fresh) for i in range(count)
        )
        self._free = deque(self.slots)
        self._held: set[int] = set()

    @property
    def free_count(self) -> int:
        return len(self._free)

    def acquire(self, lane: Lane) -> Slot | None:
        """The slot that has been free for longest, with ``lane`` waiting for its last use; None while all are held."""
        if not self.slots:
            raise LaneError("Cannot acquire a slot of a ring that was closed.")
        if not self._free:
            return None
        lane.wait(self._free[0].last_use)  # first, for it may raise, and the slot must not be lost then
        slot = self._free.popleft()
        self._held.add(slot.index)
        return slot

    def check(self) -> None:
        """Assert conservation: every slot is either free or held."""
        assert {slot.index for slot in self._free} | self._held == set(range(len(self.slots)))
        assert len(self._free) + len(self._held) == len(self.slots)

    def close(self) -> None:
        """Wait for the last use of every free slot, then return the memory.

        Held slots must be idle. Safe to call twice.
        """
        try:
            for slot in self._free:
                slot.last_use.synchronize()
        finally:
            self._free.clear()
            self._held.clear()
            self.slots = ()
            self._block.close()

    def _release(self, slot: Slot, last_use: Event) -> None:
        assert slot.index in self._held, f"slot {slot.index} is not held"
        if self._poison is not None:
            self._poison.wait(last_use)
            self._poison.fill(slot.bytes, 0xFF)
            last_use = self._poison.record()
        slot.last_use = last_use
        self._held.remove(slot.index)
        self._free.append(slot)
