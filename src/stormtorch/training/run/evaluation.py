"""The loss on data that is not trained on: the mean over its tokens, streamed through the same budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import nn

from ..model.own_model import Batch, Loss
from ..model.untouched import untouched


def trained_tokens(batch: Batch) -> torch.Tensor:
    """How many predictions of a batch count; the first label of a row has nothing in front of it."""
    return (batch["labels"][:, 1:] != -100).sum()


def evaluate(
    model: nn.Module,
    loss_of: Loss,
    batches: Iterable[Batch],
    *,
    limit: int | None,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Mean loss per token over at most ``limit`` batches; None if somebody wants it to ``stop`` before that. Waits for
    the result; changes nothing."""
    total: torch.Tensor | None = None
    count: torch.Tensor | None = None
    with untouched(model, device):
        for batch in itertools.islice(batches, limit):
            if stop():
                return None
            tokens = trained_tokens(batch)
            weighted = loss_of(model, batch).double() * tokens
            total = weighted if total is None else total + weighted
            count = tokens if count is None else count + tokens
    return float("nan") if total is None or count is None else float(total / count)
