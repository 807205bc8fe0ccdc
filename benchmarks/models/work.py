"""What is trained: rows of data, always the same ones in the same order, and the loss of a batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .build import CONFIGS, SD3

_KEPT = 16  # rows that are made; then they come again
_LATENTS, _PIXELS = 16, 3  # channels
_TEXT_TOKENS = 333  # Stable Diffusion 3: 77 of CLIP, 256 of T5


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Gives rows in turn, whatever index is asked for: every method trains on the same ones, however it samples.

    A row has ``sequence`` tokens: words, or the patches of an image.
    """

    def __init__(self, config: str, sequence: int, count: int, dtype: torch.dtype) -> None:
        self._count, self._next = count, 0
        generator = torch.Generator().manual_seed(0)
        make = {SD3: _latents, "vit": _pixels}.get(CONFIGS[config][0], _words)
        settings = CONFIGS[config][1]
        self._rows = [make(settings, sequence, generator, dtype) for _ in range(min(count, _KEPT))]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, _index: int) -> dict[str, Tensor]:
        self._next += 1
        return self._rows[(self._next - 1) % len(self._rows)]

    def batch(self, size: int, device: torch.device) -> dict[str, Tensor]:
        """The next rows, as a trainer would collate them."""
        rows = [self[0] for _ in range(size)]
        return {name: torch.stack([row[name] for row in rows]).to(device, non_blocking=True) for name in rows[0]}


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    if "noise" not in batch:
        found: Tensor = model(**batch).loss
        return found
    times, clean, noise = batch["times"], batch["clean"], batch["noise"]
    share = times.view(-1, 1, 1, 1)
    noisy = (1 - share) * clean + share * noise
    velocity = model(
        hidden_states=noisy, encoder_hidden_states=batch["text"], pooled_projections=batch["pooled"],
        timestep=1000 * times,
    ).sample  # fmt: skip
    return torch.nn.functional.mse_loss(velocity.float(), (noise - clean).float())


def _words(
    settings: dict[str, Any], sequence: int, generator: torch.Generator, _dtype: torch.dtype
) -> dict[str, Tensor]:
    row = torch.randint(settings["vocab_size"], (sequence,), generator=generator)
    return {"input_ids": row, "labels": row}


def _side(sequence: int) -> int:
    side = math.isqrt(sequence)
    if side * side != sequence:
        raise ValueError(f"{sequence} patches are no square image")
    return side


def _pixels(
    settings: dict[str, Any], sequence: int, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    side = _side(sequence) * settings["patch_size"]
    if side != settings["image_size"]:
        raise ValueError(f"{sequence} patches are no image of the model's size")
    return {
        "pixel_values": torch.randn(_PIXELS, side, side, generator=generator).to(dtype),
        "labels": torch.randint(settings["num_labels"], (), generator=generator),
    }


def _latents(
    settings: dict[str, Any], sequence: int, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    side = _side(sequence) * 2  # two by two latents are a patch
    shapes = {
        "clean": (_LATENTS, side, side),
        "noise": (_LATENTS, side, side),
        "text": (min(_TEXT_TOKENS, sequence), settings.get("joint_attention_dim", 4096)),
        "pooled": (settings.get("pooled_projection_dim", 2048),),
    }
    row = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return row | {"times": torch.rand((), generator=generator).to(dtype)}
