"""The loss of a causal model without all of its logits, which may need more memory than the rest of the device's use.

The head computes the loss instead of logits, tile by tile, with `linear_cross_entropy`. That happens inside the head's
own call, while its weight is on the device, and works for any model that does not change its logits afterwards. A cap
(Gemma 2's ``final_logit_softcapping``) is part of the loss here, and the model's own is off meanwhile. Some models
scale their logits. So a check compares both ways on a few tokens first, and refuses models for which they differ.

A head that runs again in backward, for recomputation, needs the same labels: it keeps them until the next batch.
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

_TOLERANCE = 0.01  # of the loss: bf16 rounding differs by less, another formula by more
_TOKENS = 64
_SOFTCAP = "final_logit_softcapping"


class ChunkedLoss:
    """A loss for ``Built``; replaces the forward of the model's head for good."""

    def __init__(self, model: nn.Module) -> None:
        anything: Any = model
        head = anything.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            what = "has adapters" if hasattr(head, "base_layer") else f"is a {type(head).__name__}"
            raise SettingError(f"chunked_loss needs a plain linear head; this one {what}. Leave it out.")
        self._head: Any = head
        self._plain = head.forward
        self._labels: torch.Tensor | None = None
        self._inside = self._checked = False
        self._config: Any = anything.config.get_text_config() if hasattr(anything, "config") else None
        self._softcap: float | None = getattr(self._config, _SOFTCAP, None)
        setattr(head, "forward", self._forward)  # noqa: B010  # of this instance alone

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if not self._checked:
            self._checked = True  # the check calls this too
            self._check(model, batch)
        self._labels = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        self._inside = True
        try:
            if self._softcap is not None:
                setattr(self._config, _SOFTCAP, None)  # it would cap the loss, which stands where logits are expected
            loss: torch.Tensor = model(input_ids=batch["input_ids"], use_cache=False).logits
            return loss
        finally:
            self._inside = False
            if self._softcap is not None:
                setattr(self._config, _SOFTCAP, self._softcap)

    def _check(self, model: nn.Module, batch: Batch) -> None:
        """Raise SettingError if the model changes its logits. Leaves the model unchanged."""
        few = {name: tensor[:1, :_TOKENS] for name, tensor in batch.items()}
        few["labels"] = few["input_ids"]
        with untouched(model, few["input_ids"].device):
            chunked, plain = self(model, few).float().item(), hf_loss(model, few).float().item()
        if not abs(chunked - plain) <= _TOLERANCE * abs(plain):
            raise SettingError(
                f"chunked_loss gives {chunked:.4f} and {type(model).__name__} gives {plain:.4f}: the model changes its "
                "logits. Leave chunked_loss out."
            )

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        labels = self._labels
        if labels is None or not (self._inside or torch.is_grad_enabled()):
            plain: torch.Tensor = self._plain(hidden)
            return plain
        return linear_cross_entropy(hidden, self._head.weight, labels, bias=self._head.bias, softcap=self._softcap)
