"""The loss of a causal model without all of its logits: these may need more memory than everything else on the device.

The model runs as it is, but its head, instead of logits, computes the loss of what it was given, by
`linear_cross_entropy`, tile by tile. That is done inside of the head's own call, where its weight is on the device, and
needs no code for any model; what is wanted is that nothing is done to the logits afterwards. Some models scale or cap
them. So the first thing is a test: both ways on a few tokens, and a refusal where they differ.

A head that runs again in backward, for a checkpoint, must do the same again: it keeps the labels until the next batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.errors import SettingError
from ...loss import linear_cross_entropy
from .hf_model import hf_loss
from .own_model import Batch
from .untouched import untouched

_CLOSE = 0.01  # of the loss: rounding of bf16 logits is less, another formula is more
_TOKENS = 64


class ChunkedLoss:
    """A loss for ``Built``; changes the model's head for as long as the model lives."""

    def __init__(self, model: nn.Module) -> None:
        anything: Any = model
        head = anything.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            what = "has adapters" if hasattr(head, "base_layer") else f"is a {type(head).__name__}"
            raise SettingError(f"chunked_loss needs a plain linear head, and this one {what}. Leave it out.")
        self._head: Any = head
        self._plain = self._head.forward
        self._labels: torch.Tensor | None = None
        self._inside = False
        setattr(self._head, "forward", self._forward)  # noqa: B010  # a method of this one instance

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        self._labels = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        self._inside = True
        try:
            loss: torch.Tensor = model(input_ids=batch["input_ids"], use_cache=False).logits
            return loss
        finally:
            self._inside = False

    def check(self, model: nn.Module, batch: Batch) -> None:
        """Raises SettingError if the model does something to its logits. Changes nothing."""
        few = {name: tensor[:1, :_TOKENS] for name, tensor in batch.items()}
        few["labels"] = few["input_ids"]
        with untouched(model, few["input_ids"].device):
            chunked, plain = self(model, few).float().item(), hf_loss(model, few).float().item()
        if not abs(chunked - plain) <= _CLOSE * abs(plain):
            raise SettingError(
                f"chunked_loss gives {chunked:.4f} where {type(model).__name__} gives {plain:.4f}: it does something "
                "to its logits. Leave it out."
            )

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        labels = self._labels
        if labels is None or not (self._inside or torch.is_grad_enabled()):
            plain: torch.Tensor = self._plain(hidden)
            return plain
        return linear_cross_entropy(hidden, self._head.weight, labels, bias=self._head.bias)
