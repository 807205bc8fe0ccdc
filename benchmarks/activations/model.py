"""The model of ``benchmarks.training`` in the sizes measured here, with a loss whose logits do not dominate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from benchmarks.training import workload
from benchmarks.training.methods import Work
from benchmarks.training.workload import Block, LanguageModel
from torch import Tensor, nn

from .loss import LossHead

_TINY, _3B = workload.SIZES["tiny"], workload.SIZES["3b"]

SIZES = {
    "tiny": _TINY,
    "tiny-32k": replace(_TINY, sequence=512),
    "tiny-8-layers": replace(_TINY, layers=2),
    "3b": _3B,
    "3b-32k": replace(_3B, sequence=32768),
    "3b-8-layers": replace(_3B, layers=8),
    # So wide that a byte of activations takes longer to make than to send, in bf16 too.
    "wide": workload.Size(width=20480, layers=3, heads=160, kv_heads=32, mlp=54272, sequence=8192),
    "tiny-wide": _TINY,
}


@dataclass(frozen=True, kw_only=True)
class LossWork(Work):
    """Work whose model gives the loss."""

    def loss(self, model: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return (model or self.model)(self.tokens)


class _Repeated(nn.Linear):
    """A projection to a few heads that gives each of them ``times`` times."""

    def __init__(self, linear: nn.Linear, *, heads: int, times: int) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.heads, self.times = heads, times

    def forward(self, x: Tensor) -> Tensor:
        heads: Tensor = super().forward(x).unflatten(-1, (self.heads, -1))
        return heads.repeat_interleave(self.times, -2).flatten(-2)


def repeat_heads(model: LanguageModel) -> None:
    """Give attention as many key heads as query heads.

    In fp32 torch has no kernel that shares them: it would fall back to one that writes out, and saves, all scores.
    """
    for block in model.layers:
        assert isinstance(block, Block)
        attention = block.attention
        heads, times = attention.kv_heads, attention.heads // attention.kv_heads
        attention.key = _Repeated(attention.key, heads=heads, times=times)
        attention.value = _Repeated(attention.value, heads=heads, times=times)
        attention.kv_heads = attention.heads


def build(
    size: workload.Size, targets: Tensor, *, dtype: torch.dtype, device: torch.device, checkpointing: bool
) -> LanguageModel:
    model = workload.build(size, dtype=dtype, device=device, checkpointing=checkpointing)
    model.head = LossHead(model.head, targets)
    return model
