"""Decides which optimizers our own Adam can run, and reads the settings of their parameter groups.

The two belong together: `runs_as_adam` must refuse every setting that `adam_step` does not read and that changes
torch's arithmetic. It decides once, when streaming begins. Groups may change after that, so every step checks again."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch

from ....core.errors import StormError
from ....native.update import AdamStep
from ...units.unit import Unit
from ..patch import users_own


def runs_as_adam(optimizer: torch.optim.Optimizer, units: list[Unit], masters: bool) -> bool:
    """Whether our own kernels compute what this optimizer would."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or users_own(optimizer, "step") is not None:
        return False
    if _unknown_setting(optimizer, {id(place.parameter) for unit in units for place in unit.places}) is not None:
        return False
    dtypes = {place.dtype for unit in units for place in unit.trained}
    return dtypes <= ({torch.float32, torch.bfloat16, torch.float16} if masters else {torch.float32})


def refuse_unknown(optimizer: torch.optim.Optimizer, streamed: Container[int]) -> None:
    """Raise if a group has got a setting that our own kernels, chosen when streaming began, do not support."""
    setting = _unknown_setting(optimizer, streamed)
    if setting is not None:
        raise StormError(
            f"Cannot step: a parameter group with streamed parameters has {setting}, set after streaming began with "
            "kernels that do not support it. Undo the setting, or close the session, set it and call storm.stream "
            "again."
        )


def _unknown_setting(optimizer: torch.optim.Optimizer, streamed: Container[int]) -> str | None:
    """The first setting that our own kernels do not support, in groups of ``streamed`` parameters (by id)."""
    for group in optimizer.param_groups:
        found = [f"{name}={group[name]!r}" for name in ("amsgrad", "differentiable", "capturable") if group.get(name)]
        for name, values in (("lr", [group["lr"]]), ("betas", group["betas"])):
            if any(isinstance(value, torch.Tensor) for value in values):
                found.append(f"a tensor as {name}")  # torch then computes in fp32; with a number, in double
        if found and any(id(parameter) in streamed for parameter in group["params"]):
            return found[0]
    return None


def adam_step(group: dict[str, Any], step: int) -> AdamStep:
    """Hyperparameters of one update, from the group's present settings."""
    return AdamStep(
        lr=float(group["lr"]),
        step=step,
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group["decoupled_weight_decay"],
        maximize=group["maximize"],
        fused=bool(group.get("fused")),
    )
