"""A Llama of given size with random bf16 weights, as sharded safetensors, never more than a shard of it in memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_SHARD_BYTES = 2_000_000_000
_COMMON: dict[str, Any] = {"vocab_size": 32768, "max_position_embeddings": 32768, "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
           "num_key_value_heads": 8},
    "7b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8},
}  # fmt: skip


@dataclass(frozen=True)
class Written:
    path: Path
    parameters: int
    bytes: int


def write_model(folder: Path, size: str) -> Written:
    """Write config and weights; made on the GPU if there is one, which is faster by far."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**_COMMON, **SHAPES[size], dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    forms = {name: tensor.shape for name, tensor in model.state_dict().items()}
    folder.mkdir(parents=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in forms.items():
        if filled and filled + shape.numel() * 2 > _SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += shape.numel() * 2
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _made(forms[name], generator, device) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    count = sum(shape.numel() for shape in forms.values())
    index = {"metadata": {"total_size": count * 2}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Written(folder, count, count * 2)


def _made(shape: torch.Size, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    if len(shape) == 1:  # the scale of a norm
        return torch.ones(shape, dtype=torch.bfloat16)
    made = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02, generator=generator)
    return made.cpu()
