"""Errors for values that are not finite, and the check of weights before a save."""

from __future__ import annotations

import torch
from torch import nn

from ...core.errors import StormError

_PIECE = 1 << 24  # elements at a time: `isfinite` makes a tensor of as many


class NotFinite(StormError):
    """A step gave a value that is not finite; no weights that it changed were saved."""


def problem_in_weights(model: nn.Module) -> str | None:
    """The first trained weight with a value that is not finite, as text; one pass over RAM."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            flat = parameter.detach().reshape(-1)
            if not all(bool(torch.isfinite(piece).all()) for piece in flat.split(_PIECE)):
                return f"{name} is not finite any more"
    return None
