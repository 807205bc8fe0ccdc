"""Models of transformers, built from configs with random weights in RAM."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

_DENSE: dict[str, Any] = {"vocab_size": 32768, "max_position_embeddings": 131072, "tie_word_embeddings": False}
# model type of transformers, and its config
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2b": ("llama", _DENSE | {"hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 25,
                 "num_attention_heads": 20, "num_key_value_heads": 10}),
    "qwen-1b": ("qwen3", _DENSE | {"vocab_size": 65536, "hidden_size": 1792, "intermediate_size": 5120,
                "num_hidden_layers": 22, "num_attention_heads": 14, "num_key_value_heads": 7, "head_dim": 128}),
    "moe-2b": ("qwen3_moe", _DENSE | {"hidden_size": 1536, "intermediate_size": 4096, "moe_intermediate_size": 768,
               "num_hidden_layers": 16, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128,
               "num_experts": 32, "num_experts_per_tok": 4}),
    "long-2b": ("llama", _DENSE | {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 18,
                "num_attention_heads": 24, "num_key_value_heads": 8}),
    "tiny": ("llama", _DENSE | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160,
             "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "tiny-moe": ("qwen3_moe", _DENSE | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160,
                 "moe_intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip


def known(name: str) -> str:
    """For ``argparse``, whose ``choices`` do not go with a default list of several."""
    if name not in CONFIGS:
        raise argparse.ArgumentTypeError(f"no such model: {name!r}. There are {', '.join(CONFIGS)}")
    return name


def build(name: str, *, dtype: torch.dtype) -> nn.Module:
    """The model, in RAM. Random numbers are drawn on the GPU where there is one: the CPU takes minutes for billions."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, settings = CONFIGS[name]
    config = AutoConfig.for_model(kind, **settings, dtype=dtype)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.to(dtype)
    rotary = {key: value for key, value in model.named_buffers() if value.is_meta}
    model.to_empty(device="cpu")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                parameter.copy_(made.normal_(std=0.02, generator=generator))
    if rotary:  # tables of positions are computed, not loaded
        inner: Any = model
        inner.model.rotary_emb = type(inner.model.rotary_emb)(config)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return model.train()


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
