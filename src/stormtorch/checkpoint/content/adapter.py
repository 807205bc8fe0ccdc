"""PEFT models: a checkpoint holds the adapter alone, in PEFT's format and under PEFT's names.

PEFT selects the tensors from a state dict of the parameters themselves. So each tensor can be traced to home memory,
written from there, and read back into it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.errors import CheckpointError
from .names import names_of

WEIGHTS = "adapter_model.safetensors"


def is_adapted(model: nn.Module) -> bool:
    """Whether ``model`` is PEFT's wrapper around another one."""
    return all(hasattr(model, name) for name in ("peft_config", "get_base_model", "save_pretrained"))


def adapter_files(model: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The adapters' tensors, by file and by PEFT's name. They are the model's own objects."""
    from peft import get_peft_model_state_dict

    own = names_of(model)
    files: dict[str, dict[str, torch.Tensor]] = {}
    covered: set[int] = set()
    for adapter in model.peft_config:
        everything = {name: own.tensors[first] for name, first in own.first.items()}
        found = get_peft_model_state_dict(
            model, state_dict=everything, adapter_name=adapter, save_embedding_layers=False
        )
        known = {id(tensor) for tensor in own.tensors.values()}
        if not found or any(id(tensor) not in known for tensor in found.values()):
            raise CheckpointError(
                f"The adapter {adapter!r} ({type(model.peft_config[adapter]).__name__}) is not made of the "
                "model's parameters alone. Save it with model.save_pretrained."
            )
        covered |= {id(tensor) for tensor in found.values()}
        files[WEIGHTS if adapter == "default" else f"{adapter}/{WEIGHTS}"] = found
    beside = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in covered]
    if beside:
        raise CheckpointError(
            f"{beside[0]!r}{f' and {len(beside) - 1} more' if len(beside) > 1 else ''} are trained but not part of an "
            "adapter, so the checkpoint would lose them. Freeze them, or name their modules in modules_to_save."
        )
    return files


def write_configs(model: Any, folder: Path) -> None:
    """Write ``adapter_config.json`` of each adapter."""
    for adapter, config in model.peft_config.items():
        shown = copy.deepcopy(config)
        shown.inference_mode = True  # as PEFT writes it; loading for training overrides it
        if shown.base_model_name_or_path is None:
            shown.base_model_name_or_path = getattr(getattr(model, "config", None), "name_or_path", None)
        where = folder if adapter == "default" else folder / adapter
        where.mkdir(exist_ok=True)
        shown.save_pretrained(str(where))


_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


def base_name(model: nn.Module, name: str) -> str:
    """The name of a model's tensor in the files of the base model."""
    return _WRAPPED.sub("", name.removeprefix("base_model.model.")) if is_adapted(model) else name


def base_names(model: nn.Module, names: Iterable[str]) -> dict[str, list[str]]:
    """Map each name in the base model's files to the model's own names of the tensors made from it.

    A module that PEFT copies in order to train it has two names."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(base_name(model, name), []).append(name)
    return found


def is_adapter_name(model: Any, name: str) -> bool:
    """Whether a tensor belongs to an adapter, so that no file of the base model has it."""
    prefix = getattr(getattr(model, "base_model", None), "prefix", None) or "lora_"
    return is_adapted(model) and str(prefix) in name
