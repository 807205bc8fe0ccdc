"""Device memory that is taken once, and bytes from torch's own allocator."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...core.errors import OutOfBudget
from ...core.sizes import format_bytes, parse_bytes, round_up
from ...core.tags import Tag, Tier
from ..books.ledger import Ledger

_GRAIN = 512  # torch's CUDA allocator rounds to this; also more than any kernel's alignment


class DeviceBlock:
    """Bytes on the device for as long as the block is open, charged before they are allocated."""

    def __init__(self, device: torch.device, size: int, *, ledger: Ledger, tag: Tag) -> None:
        self.size = size = parse_bytes(size)
        self._reservation = ledger.reserve(Tier.DEVICE, tag, round_up(size, _GRAIN))
        try:
            with torch.inference_mode(False):  # else lanes could not write it
                self._bytes: torch.Tensor | None = torch.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            self._reservation.release()
            if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
                raise  # the CPU's allocator has no class of its own for a lack of memory
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
    """Bytes from torch's own allocator, for tensors that belong to the user's graph again: like every activation on the
    device, they are not in the ledger."""
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device=device)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of ``tensor``, shared, not copied."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
