"""Device memory that is taken once, and bytes from torch's own allocator."""

from __future__ import annotations

import torch

from ...core.errors import OutOfBudget
from ...core.sizes import format_bytes, parse_bytes, round_up
from ...core.tags import Tag, Tier
from ..books.ledger import Ledger, Reservation

_GRAIN = 512  # torch's CUDA allocator rounds to this; also more than any kernel's alignment


def charged_bytes(device: torch.device, size: int, *, ledger: Ledger, tag: Tag) -> tuple[torch.Tensor, Reservation]:
    """Bytes on the device, and their charge, which is made first. The caller releases it when it drops the bytes."""
    size = parse_bytes(size)
    reservation = ledger.reserve(Tier.DEVICE, tag, round_up(size, _GRAIN))
    try:
        return bytes_for_graph(size, device), reservation
    except RuntimeError as error:
        reservation.release()
        if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
            raise  # the CPU's allocator has no class of its own for a lack of memory
        budget = ledger.budgets[Tier.DEVICE]
        raise OutOfBudget(
            f"Cannot allocate {format_bytes(size)} on the device for {tag.name}",
            f"within the budget of {format_bytes(budget.limit_bytes)}, but the device itself is full",
            f"The limit is the device's memory, not {budget.given}.",
            "Lower vram, or end other programs on the GPU.",
        ) from error


def bytes_for_graph(size: int, device: torch.device) -> torch.Tensor:
    """Bytes from torch's own allocator, for tensors that belong to the user's graph again: like every activation on the
    device, they are not in the ledger."""
    with torch.inference_mode(False):  # else lanes could not write it
        return torch.empty(size, dtype=torch.uint8, device=device)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of ``tensor``, shared, not copied."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
