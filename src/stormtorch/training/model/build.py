"""Builds the model of a run, with the function that computes a batch's loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint.loading.mapped import map_weights
from ...core.errors import OutOfBudget, SettingError
from ...core.sizes import format_bytes
from ...memory.books.limits import host_available_bytes
from ..settings.train_settings import TrainSettings, is_callable_name
from . import hf_model
from .chunked_loss import ChunkedLoss
from .lora import add_adapters
from .own_model import Loss, make_model, own_loss

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model that is ready to be streamed.

    ``weights``: the directory whose files to read into it afterwards; None if it has its values.
    """

    model: nn.Module
    loss: Loss
    origin: str  # of its values, for the user
    opening: str  # how to open a checkpoint: an expression with {path}
    weights: Path | None = None
    read_bytes: int = 0  # of the files that its values come from
    by_tokens: bool = False  # whether the loss is a mean over trained tokens
    copy_files: Callable[[Path], None] = lambda _: None  # copies files that training does not change to a checkpoint


def build(settings: TrainSettings, *, values: bool) -> Built:
    """Build the model. Without ``values`` a checkpoint brings them, so none are made if that saves time."""
    assert settings.model is not None
    if not is_callable_name(settings.model):
        return _build_hf(Path(settings.model), settings, values=values or settings.lora_rank > 0)
    return Built(
        model=make_model(settings.model, DTYPES.get(settings.dtype)),
        loss=own_loss(settings.loss),
        origin=f"as {settings.model} made it",
        opening="stormtorch.checkpoint.load_weights(model, {path!r})",
    )


def build_outline(settings: TrainSettings) -> nn.Module | None:
    """The model on the meta device, with its adapters; None for a model that only user code can build."""
    assert settings.model is not None
    if is_callable_name(settings.model):
        return None
    path = Path(settings.model)
    model = hf_model.build_empty(hf_model.read_config(path), DTYPES[settings.dtype])
    in_files = settings.disk and hf_model.weight_files(path) and hf_model.why_not_direct(model, path) is None
    if settings.lora_rank:
        model = add_adapters(model, settings, values=False)
        if in_files:
            map_weights(model, path)
    return model


def check_base(settings: TrainSettings) -> None:
    """Refuse adapters on a model without weights."""
    path = Path(str(settings.model))
    if path.exists() and not hf_model.weight_files(path):
        raise SettingError(
            f"--lora-rank {settings.lora_rank}: --model {path} has no weights, and checkpoints hold adapters without "
            "their model, which would be lost. Name a model with weights, or train all of it."
        )


def _build_hf(path: Path, settings: TrainSettings, *, values: bool) -> Built:
    dtype = DTYPES[settings.dtype]
    config = hf_model.read_config(path)
    weights: Path | None = None
    files = hf_model.weight_files(path) if values else []
    with torch.random.fork_rng(devices=[]):  # random weights depend on the seed alone
        model = hf_model.build_empty(config, dtype)
    if not values:
        origin = "from the checkpoint"
    elif not files:
        _check_room(model, path)
        model, origin = hf_model.build_random(config, dtype), f"random, seed {settings.seed}"
    else:
        reason = hf_model.why_not_direct(model, path)
        if reason is None:
            weights, origin = path, f"read from {path} straight into home memory"
        else:
            _check_room(model, path)
            model = hf_model.build_in_ram(path, config, dtype)
            origin = f"loaded by transformers, then moved to home memory: {reason}"
    base: Any = model
    hf_model.take_generation_config(base, path)
    opener = "transformers.AutoModelForCausalLM"
    if settings.lora_rank:
        # Adapters name their base: by its name on the Hub if it is in the Hub's cache, else as the user did. A relative
        # path remains relative: peft resolves it in the current directory.
        base.name_or_path = base.config.name_or_path = (hf_model.hub_name(path) or (str(path),))[0]
        model, opener = add_adapters(model, settings), "peft.AutoPeftModelForCausalLM"
        if settings.disk and weights is not None:  # frozen weights need no RAM
            origin = f"mapped from {path}, to be read from there as far as RAM has no room"
            if map_weights(model, weights):
                weights, files = None, []
    return Built(
        model=model,
        loss=ChunkedLoss(base) if settings.chunked_loss else hf_model.hf_loss,
        origin=origin,
        opening=f"{opener}.from_pretrained({{path!r}})",
        weights=weights,
        read_bytes=sum(file.stat().st_size for file in files if file.is_file()),
        by_tokens=True,
        copy_files=lambda folder: hf_model.copy_generation_config(path, folder),
    )


def _check_room(model: nn.Module, path: Path) -> None:
    """Refuse a model that does not fit in free RAM. No ledger counts while it is made: the system would kill us."""
    size, room = sum(parameter.nbytes for parameter in model.parameters()), host_available_bytes()
    if size > room:
        raise OutOfBudget(
            f"Cannot make {path} in RAM",
            f"its weights alone take {format_bytes(size)}, and {format_bytes(room)} are free",
            "The limit is the free RAM.",
            "Use a smaller model, or a machine with more RAM.",
        )
