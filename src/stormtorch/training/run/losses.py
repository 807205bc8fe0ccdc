"""Losses with gradients for a step, losses on evaluation data, and samples."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ...core.errors import SettingError
from ..model.hf_model import positions
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


def check_can_sample(model: nn.Module) -> None:
    if not callable(getattr(model, "generate", None)):
        raise SettingError(f"{type(model).__name__} has no generate(). Leave out --sample-prompts.")


def sample(model: nn.Module, tokenizer: Any, prompt: str, *, tokens: int, device: torch.device) -> str:
    """The continuation of a prompt, without the prompt, up to the model's positions. Leaves no trace in training."""
    generator: Any = model
    with untouched(model, device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns that weights and inputs are on different devices
        given = torch.tensor([tokenizer.encode(prompt)], dtype=torch.int64).to(device)
        config = getattr(model, "config", None)
        limit = positions(config) if config is not None else None  # a longer continuation would end the run
        most = tokens if limit is None else min(tokens, limit - given.shape[1])
        if most < 1 or not given.numel():
            return ""
        written = generator.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=most,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
        text: str = tokenizer.decode(written[0, given.shape[1] :], skip_special_tokens=True)
    return text
