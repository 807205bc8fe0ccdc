"""The small files that ``from_pretrained`` needs beside the weights: the model's config and its generation settings."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from . import adapter


def write_configs(model: nn.Module, folder: Path) -> None:
    """Write the configs of a transformers or PEFT model; nothing for other models."""
    if adapter.is_adapted(model):
        adapter.write_configs(model, folder)
        return
    inner: Any = getattr(model, "_orig_mod", model)
    config: Any = getattr(inner, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    shown = copy.deepcopy(config)
    shown.architectures = [type(inner).__name__]
    dtype = next((p.dtype for p in inner.parameters() if p.is_floating_point()), None)
    if dtype is not None:
        shown.dtype = str(dtype).removeprefix("torch.")
    shown.save_pretrained(str(folder))
    generation: Any = getattr(inner, "generation_config", None)
    if hasattr(generation, "save_pretrained") and inner.can_generate():
        generation.save_pretrained(str(folder))
