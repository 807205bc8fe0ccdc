"""Models on the meta device: their parameters get a home, and their values from ``load_state_dict`` afterwards.

A meta tensor cannot be given memory in place, so its parameter is exchanged for another object, in the modules and in
the optimizer. Until a state dict is loaded the values are zeros.
"""

from __future__ import annotations

import torch
from torch import nn

from ..core.errors import SettingError


def give_substance(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Exchange meta parameters for ones that hold no memory yet; refuses meta buffers, which nothing would fill."""
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise SettingError(
            f"The buffers {', '.join(empty[:4])}{', ...' if len(empty) > 4 else ''} are on the meta device. Build the "
            "model with real buffers: torch.nn.utils.skip_init, or set them before streaming."
        )
    exchanged: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in exchanged:
                zero = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                exchanged[id(parameter)] = nn.Parameter(zero, parameter.requires_grad)
            module._parameters[name] = exchanged[id(parameter)]
    if exchanged and optimizer is not None:
        for group in optimizer.param_groups:
            group["params"] = [exchanged.get(id(parameter), parameter) for parameter in group["params"]]
