"""Not a number: what is wrong, in which step, and whether weights may still be saved."""

from __future__ import annotations

import torch
from torch import nn

from ...core.errors import StormError

_PIECE = 1 << 24  # elements looked at in one go: what `isfinite` makes of them is as large


class NotFinite(StormError):
    """A step gave something that is no finite number; nothing that it touched was saved."""


def problem_in_weights(model: nn.Module) -> str | None:
    """Which trained weight holds something that is not finite; one pass over RAM."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            flat = parameter.detach().reshape(-1)
            if not all(bool(torch.isfinite(piece).all()) for piece in flat.split(_PIECE)):
                return f"{name} is not finite any more"
    return None
