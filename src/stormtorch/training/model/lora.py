"""Adds peft's adapters to a model, which may have no memory yet, and initialises them."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.errors import SettingError
from ..errors import reason, require
from ..settings.train_settings import TrainSettings
from .hf_model import hub_name


def add_adapters(model: nn.Module, settings: TrainSettings, *, values: bool = True) -> nn.Module:
    """The model with adapters, the only trained parameters; torch's seed decides their initial values.

    Without ``values``, the adapters of a model on the meta device remain there."""
    peft = require("peft", extra="hf", why="lora_rank")
    targets = list(settings.lora_targets) if settings.lora_targets is not None else linear_layers(model)
    widest = max(max(parameter.shape, default=0) for parameter in model.parameters())
    if settings.lora_rank > widest:
        raise SettingError(
            f"lora_rank={settings.lora_rank} is larger than any side of the model's matrices; the longest is {widest}. "
            "Usual values: 4 to 256."
        )
    config = peft.LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha if settings.lora_alpha is not None else 2 * settings.lora_rank,
        lora_dropout=settings.lora_dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
        revision=None if (named := hub_name(Path(str(settings.model)))) is None else named[1],
    )
    try:
        adapted: nn.Module = peft.get_peft_model(model, config)
    except (ValueError, TypeError) as error:
        raise SettingError(f"lora_targets={targets!r} cannot be used: {reason(error)}.") from error
    wrapper: Any = getattr(peft.tuners.lora.layer, "ParamWrapper", ())  # older versions have none
    for name, module in adapted.named_modules():
        if isinstance(module, wrapper):
            # peft replaces this weight in each forward, and so does streaming.
            raise SettingError(
                f"lora_targets: {name} is not a linear layer, and its weights cannot be streamed with adapters. Name "
                "others, such as q_proj v_proj."
            )
        if values and hasattr(module, "reset_lora_parameters"):
            _initialise(module)
    _check_all_are_used(targets, adapted)
    return adapted


def _check_all_are_used(targets: list[str], adapted: Any) -> None:
    """Refuse a target that matches nothing: peft ignores it silently if another matches."""
    used = [str(name) for name in adapted.targeted_module_names]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in used):
            known = {name.rpartition(".")[2] for name, _ in adapted.named_modules()}
            near = difflib.get_close_matches(target, known, n=2, cutoff=0.5)
            meant = f" Did you mean {' or '.join(near)}?" if near else ""
            raise SettingError(f"lora_targets: the model has no module {target!r} to adapt.{meant}")


def linear_layers(model: nn.Module) -> list[str]:
    """The last names of linear layers, GPT-2's own kind included, except the head's."""
    anything: Any = model
    head = anything.get_output_embeddings()
    found = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and module is not head
    }
    return sorted(found)


def _initialise(layer: Any) -> None:
    """Initialise adapters that peft put on the meta device, beside their base weight."""
    for name in list(layer.lora_A):
        parts = [layer.lora_A[name], layer.lora_B[name]]
        if any(parameter.is_meta for part in parts for parameter in part.parameters()):
            for part in parts:
                part.to_empty(device=torch.device("cpu"))
            layer.reset_lora_parameters(name, True)
    for name in list(layer.lora_embedding_A):  # an embedding's adapters are parameters, not modules
        if layer.lora_embedding_A[name].is_meta:
            for parameters in (layer.lora_embedding_A, layer.lora_embedding_B):
                parameters[name] = nn.Parameter(torch.empty_like(parameters[name], device="cpu"))
            layer.reset_lora_parameters(name, True)
