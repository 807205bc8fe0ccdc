"""Losses of batches: with gradients for a step, or without, on evaluation data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from ..model.own_model import Batch, Loss
from ..model.untouched import untouched


def trained_tokens(batch: Batch) -> torch.Tensor:
    """The number of trained tokens in a batch; the first of a row is never predicted."""
    return (batch["labels"][:, 1:] != -100).sum()


def forward_backward(model: nn.Module, loss_of: Loss, batches: Sequence[Batch], *, by_tokens: bool) -> torch.Tensor:
    """Accumulate the gradients of the mean loss over ``batches`` and return the loss; waits for nothing.

    ``by_tokens``: weights each batch's mean by its trained tokens, so that the result is the mean over all tokens of
    the step. Otherwise all batches have equal weights.
    """
    if len(batches) == 1:
        loss = loss_of(model, batches[0])
        loss.backward()
        return loss.detach()
    shares: Iterable[torch.Tensor | float] = itertools.repeat(1.0 / len(batches))
    if by_tokens:
        counts = torch.stack([trained_tokens(batch).float() for batch in batches])
        shares = counts / counts.sum()
    total: torch.Tensor | None = None
    for share, batch in zip(shares, batches, strict=False):
        part = loss_of(model, batch) * share
        part.backward()
        total = part.detach() if total is None else total + part.detach()
    assert total is not None
    return total


def evaluate(
    model: nn.Module,
    loss_of: Loss,
    batches: Iterable[Batch],
    *,
    limit: int | None,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Mean loss per token over at most ``limit`` batches; None if ``stop`` returns True before the end.

    Streams within the same budget as training. Waits for the result; changes nothing."""
    total = count = torch.zeros((), dtype=torch.float64, device=device)
    with untouched(model, device):
        for batch in itertools.islice(batches, limit):
            if stop():
                return None
            tokens = trained_tokens(batch)
            total, count = total + loss_of(model, batch).double() * tokens, count + tokens
    return float(total / count)  # nan if there was no batch
