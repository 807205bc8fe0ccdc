"""Names of a model's weights in files: as in its ``state_dict``, each tensor once, under its first name.

Tied parameters have several names; ``from_pretrained`` and `load_weights` expect one of them in the file. The names
leave out the wrappers of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...core.errors import WrongModel
from ...memory.disk.safetensors_header import Entry


@dataclass
class Names:
    """The tensors of a model by name, and the other content of its ``state_dict``."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)  # every name of a tensor to its first
    non_persistent: set[str] = field(default_factory=set)  # buffers that are in no state_dict
    modules_with_extra: dict[str, nn.Module] = field(default_factory=dict)


def names_of(model: nn.Module) -> Names:
    names = Names()
    known: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        prefix = prefix.replace("_orig_mod.", "")
        for kind in (module._parameters, module._buffers):
            members: Mapping[str, torch.Tensor | None] = kind
            for name, tensor in members.items():
                if tensor is None:
                    continue
                if kind is module._buffers and name in module._non_persistent_buffers_set:
                    names.non_persistent.add(prefix + name)
                    continue
                first = known.setdefault(id(tensor), prefix + name)
                names.first[prefix + name] = first
                names.tensors.setdefault(first, tensor)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            names.modules_with_extra[prefix + "_extra_state"] = module
    return names


def extra_states(names: Names) -> dict[str, Any]:
    return {name: module.get_extra_state() for name, module in names.modules_with_extra.items()}


def compare(found: Mapping[str, Entry], wanted: Mapping[str, torch.Tensor], where: str, *, dtypes: bool) -> None:
    """Raise WrongModel unless the file has exactly the wanted tensors, in the model's shapes."""
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted]
    if missing or unexpected:
        parts = []
        if missing:
            parts.append(f"{_some(missing)} {'is' if len(missing) == 1 else 'are'} missing there")
        if unexpected:
            parts.append(f"{_some(unexpected)} {'is' if len(unexpected) == 1 else 'are'} not in the model")
        raise WrongModel(f"{where} is of another model: {', '.join(parts)}. Build the model that it was saved from.")
    for name, tensor in wanted.items():
        entry = found[name]
        if entry.shape != tuple(tensor.shape):
            raise WrongModel(
                f"{where} is of another model: {name!r} has shape {entry.shape} there and {tuple(tensor.shape)} in "
                f"the model. Build the model that it was saved from."
            )
        if dtypes and entry.dtype != tensor.dtype:
            raise WrongModel(
                f"{where} has {name!r} in {entry.dtype}, the model in {tensor.dtype}. Build it in that dtype to "
                "resume exactly, or load the weights alone with load_weights, which converts them."
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
