"""The one workload that every method trains: a Llama-shaped causal language model in plain torch.

Weights and tokens are the same for every method, dtype and device, so that the losses in one table can be compared.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_SEED = 20
_EPSILON = 1e-5
_ROTARY_BASE = 10_000.0


@dataclass(frozen=True, kw_only=True)
class Size:
    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int = 32768
    sequence: int = 2048

    @property
    def parameters(self) -> int:
        head_width = self.width // self.heads
        attention = 2 * self.width * self.width + 2 * self.width * self.kv_heads * head_width
        block = attention + 3 * self.width * self.mlp + 2 * self.width
        return self.layers * block + 2 * self.vocabulary * self.width + self.width


SIZES = {
    "tiny": Size(width=256, layers=4, heads=4, kv_heads=2, mlp=512, vocabulary=1024, sequence=128),
    "3b": Size(width=3072, layers=28, heads=24, kv_heads=8, mlp=8192),
    "7b": Size(width=4096, layers=32, heads=32, kv_heads=8, mlp=14336),
    "11b": Size(width=5120, layers=40, heads=40, kv_heads=8, mlp=13824),
}


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast the stream between blocks is fp32 and the weight too; elsewhere the cast does nothing.
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), _EPSILON)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = size.heads, size.kv_heads, size.width // size.heads
        kv_width = self.kv_heads * self.head_width
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, kv_width, bias=False)
        self.value = nn.Linear(size.width, kv_width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(*y.shape[:-1], heads, self.head_width).transpose(1, 2)

        query = _rotated(split(self.query(x), self.heads))
        key = _rotated(split(self.key(x), self.kv_heads))
        value = split(self.value(x), self.kv_heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.mlp, bias=False)
        self.up = nn.Linear(size.width, size.mlp, bias=False)
        self.down = nn.Linear(size.mlp, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(size.width), Attention(size)
        self.mlp_norm, self.mlp = RMSNorm(size.width), SwiGLU(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class LanguageModel(nn.Module):
    """``model(tokens)`` gives logits; ``checkpointing`` keeps only the input of each block for backward."""

    def __init__(self, size: Size, *, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(size: Size, *, dtype: torch.dtype, device: torch.device, checkpointing: bool = True) -> LanguageModel:
    """A model with weights from N(0, 0.02²), rounded to bf16 whatever ``dtype`` is.

    Drawing 3·10⁹ normal numbers takes the CPU half a minute. So one pool is drawn, as large as the largest parameter,
    and every parameter is a window into it that starts elsewhere and wraps around.
    """
    with torch.device("meta"):
        model = LanguageModel(size, checkpointing=checkpointing).to(dtype)
    model.to_empty(device=device)
    length = max(parameter.numel() for parameter in model.parameters())
    generator = torch.Generator().manual_seed(_SEED)
    pool = torch.empty(length).normal_(0, 0.02, generator=generator).to(device, torch.bfloat16)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1)
                continue
            flat, start = parameter.view(-1), index * 7_368_787 % length
            first = min(flat.numel(), length - start)
            flat[:first].copy_(pool[start : start + first])
            flat[first:].copy_(pool[: flat.numel() - first])
    return model


def batch(size: Size, micro_batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and, one further, targets."""
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(size.vocabulary, (micro_batch, size.sequence + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1))


def _rotated(x: Tensor) -> Tensor:
    cos, sin = _rotary_table(x.shape[-2], x.shape[-1], x.device, x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@functools.cache
def _rotary_table(length: int, head_width: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    exponent = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * _ROTARY_BASE**-exponent
    return angle.cos().to(dtype), angle.sin().to(dtype)
