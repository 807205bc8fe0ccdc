"""Adapters that parametrize a parameter in each forward, as peft's ``target_parameters`` does for fused experts."""

from __future__ import annotations

from torch import nn


def parametrized_in_forward(model: nn.Module) -> set[tuple[int, str]]:
    """The parameters that such adapters in ``model`` wrap: the id of the module that holds each, and its name there."""
    found = set()
    for module in model.modules():
        name, base = getattr(module, "parameter_name", None), getattr(module, "get_base_layer", None)
        if isinstance(name, str) and callable(base) and hasattr(module, "_activate_lora"):
            found.add((id(base()), name))
    return found
