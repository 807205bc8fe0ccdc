"""AdamW with fp32 masters of bf16 weights, all on the weights' device: the precision of STORM without streaming."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class MasterAdamW(torch.optim.AdamW):
    """Updates a copy of each weight in fp32, and rounds it to the weight. ``step`` takes the gradients away. Weights
    that are in fp32 are their own masters. ``max_norm``: clips gradients in fp32, as STORM does; torch's own clipping
    of bf16 gradients would round them again."""

    def __init__(self, weights: Iterable[Tensor], *, max_norm: float | None = None, **settings: Any) -> None:
        self._max_norm = max_norm
        self._weights = [weight for weight in weights if weight.requires_grad]
        self._masters = [
            weight if weight.dtype == torch.float32 else nn.Parameter(weight.detach().float())
            for weight in self._weights
        ]
        super().__init__(self._masters, fused=True, **settings)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        pairs = [pair for pair in zip(self._weights, self._masters, strict=True) if pair[0] is not pair[1]]
        for weight, master in pairs:
            master.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(self._masters, self._max_norm)
        super().step()
        self.zero_grad()
        if pairs:
            torch._foreach_copy_([weight.detach() for weight, _ in pairs], [master.detach() for _, master in pairs])
