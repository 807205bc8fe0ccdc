"""Forward and backward of one step, over one batch or several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..model.own_model import Batch, Loss
from .evaluation import trained_tokens


def forward_backward(model: nn.Module, loss_of: Loss, batches: Sequence[Batch], *, by_tokens: bool) -> torch.Tensor:
    """Gradients of the mean loss over ``batches``, which is returned; waits for nothing.

    ``by_tokens``: each batch's own mean counts by its number of tokens to be learnt, so that the result is the mean
    over all tokens of the step, however they are spread. Otherwise all batches count alike.
    """
    if len(batches) == 1:
        loss = loss_of(model, batches[0])
        loss.backward()
        return loss.detach()
    counts = [trained_tokens(batch).float() for batch in batches] if by_tokens else []
    everything = torch.stack(counts).sum() if by_tokens else None
    total: torch.Tensor | None = None
    for index, batch in enumerate(batches):
        share = counts[index] / everything if everything is not None else 1.0 / len(batches)
        part = loss_of(model, batch) * share
        part.backward()
        total = part.detach() if total is None else total + part.detach()
    assert total is not None
    return total
