"""Models of transformers and diffusers, built from configs with random weights in RAM. Nothing is downloaded."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Any

import torch
from benchmarks.finetune.weights import SHAPES
from benchmarks.training.packages import folder
from torch import nn

_DENSE: dict[str, Any] = {"vocab_size": 32768, "max_position_embeddings": 131072, "tie_word_embeddings": False}
_MOE = _DENSE | {"hidden_size": 1536, "intermediate_size": 4096, "moe_intermediate_size": 768, "num_hidden_layers": 16,
                 "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 32,
                 "num_experts_per_tok": 4}  # fmt: skip
_TINY = _DENSE | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
                  "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
_TINY_MOE = _TINY | {"moe_intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 16, "num_experts": 4,
                     "num_experts_per_tok": 2}  # fmt: skip
_VIT: dict[str, Any] = {"patch_size": 14, "num_labels": 1000}
SD3 = "sd3"  # a diffusion transformer of diffusers; every other type is a model type of transformers
# type, and its config
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2b": ("llama", _DENSE | {"hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 25,
                 "num_attention_heads": 20, "num_key_value_heads": 10}),
    "llama-3b": ("llama", _DENSE | SHAPES["3b"]),
    "llama-7b": ("llama", _DENSE | SHAPES["7b"]),
    "qwen-1b": ("qwen3", _DENSE | {"vocab_size": 65536, "hidden_size": 1792, "intermediate_size": 5120,
                "num_hidden_layers": 22, "num_attention_heads": 14, "num_key_value_heads": 7, "head_dim": 128}),
    "moe-2b": ("qwen3_moe", _MOE),
    "moe-loop-2b": ("qwen3_moe", _MOE | {"experts_implementation": "eager"}),  # a loop over experts in Python
    "moe-30b": ("qwen3_moe", _MOE | {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
                "num_hidden_layers": 48, "num_attention_heads": 32, "num_experts": 128,
                "num_experts_per_tok": 8}),  # the shape of Qwen3-30B-A3B
    "vit-2b": ("vit", _VIT | {"hidden_size": 1664, "intermediate_size": 8192, "num_hidden_layers": 48,
               "num_attention_heads": 16, "image_size": 448}),  # the shape of ViT-G/14
    "dit-2b": (SD3, {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536,
               "pos_embed_max_size": 192}),  # Stable Diffusion 3 medium
    "long-2b": ("llama", _DENSE | {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 18,
                "num_attention_heads": 24, "num_key_value_heads": 8}),
    "tiny": ("llama", _TINY),
    "tiny-deep": ("llama", _TINY | {"intermediate_size": 192, "num_hidden_layers": 40}),
    "tiny-qwen": ("qwen3", _TINY | {"head_dim": 16}),
    "tiny-moe": ("qwen3_moe", _TINY_MOE),
    "tiny-moe-loop": ("qwen3_moe", _TINY_MOE | {"experts_implementation": "eager"}),
    "tiny-vit": ("vit", _VIT | {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
                 "num_attention_heads": 4, "image_size": 56, "num_labels": 16}),
    "tiny-dit": (SD3, {"num_layers": 4, "num_attention_heads": 4, "attention_head_dim": 16,
                 "caption_projection_dim": 64, "joint_attention_dim": 64, "pooled_projection_dim": 64,
                 "pos_embed_max_size": 16}),
}  # fmt: skip


def known(name: str) -> str:
    """For ``argparse``, whose ``choices`` do not go with a default list of several."""
    if name not in CONFIGS:
        raise argparse.ArgumentTypeError(f"no such model: {name!r}. There are {', '.join(CONFIGS)}")
    return name


def build(name: str, *, dtype: torch.dtype) -> nn.Module:
    """The model, in RAM. Random numbers are drawn on the GPU where there is one: the CPU takes minutes for billions."""
    kind, settings = CONFIGS[name]
    model = _of_diffusers(settings, dtype) if kind == SD3 else _of_transformers(kind, settings, dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if path.endswith("bias") else 1.0)
            else:
                made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                parameter.copy_(made.normal_(std=0.02, generator=generator))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return model.train()


def _of_transformers(kind: str, settings: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

    config = AutoConfig.for_model(kind, **settings, dtype=dtype)
    family = AutoModelForImageClassification if kind == "vit" else AutoModelForCausalLM
    with torch.device("meta"):
        model: Any = family.from_config(config)  # type: ignore[no-untyped-call]
    asked = settings.get("experts_implementation")
    if asked is not None and model.config._experts_implementation != asked:
        raise RuntimeError(f"this version of transformers does not take experts_implementation={asked!r}")
    model.to(dtype)
    rotary = any(value.is_meta for value in model.buffers())
    model.to_empty(device="cpu")
    if rotary:  # tables of positions are computed, not loaded
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    made: nn.Module = model
    return made


def _of_diffusers(settings: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """A package that is installed comes before the one in the peers' folder."""
    if importlib.util.find_spec("diffusers") is None:
        if not (folder() / "diffusers").is_dir():
            raise ModuleNotFoundError("diffusers is not installed, and not among the peers (benchmarks/offline.sh)")
        sys.path.append(str(folder()))  # last: torch and transformers keep what they have imported
    import diffusers  # type: ignore[import-not-found]

    with torch.device("meta"):
        model: nn.Module = diffusers.SD3Transformer2DModel(**settings)
    model.to(dtype)
    model.to_empty(device="cpu")
    small = diffusers.SD3Transformer2DModel(**settings | {"num_layers": 1})
    for path, buffer in small.named_buffers():  # the table of positions, which does not depend on the layers
        model.get_buffer(path).copy_(buffer)
    return model


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
