"""Makes the optimizer of the settings, with its options."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

import torch
from torch import nn

from ...core.errors import SettingError
from ..errors import reason
from ..settings.train_settings import TrainSettings

_UNUSABLE = {"lbfgs": "it calls the model several times in a step", "sparseadam": "gradients are not sparse"}


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """Make the optimizer for trained parameters. Decays matrices alone, so that norms and biases keep their scale."""
    kind, options = optimizer_and_options(settings)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise SettingError("Nothing to train: no parameter of the model requires a gradient.")
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    others = [parameter for parameter in trained if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    given: Any = [group for group in groups if group["params"]] if settings.weight_decay else trained
    try:
        return kind(given, **options)
    except (ValueError, TypeError) as error:  # e.g. Muon, which takes matrices only
        raise SettingError(f"optimizer={settings.optimizer} cannot be used: {reason(error)}. Use another.") from error


def optimizer_and_options(settings: TrainSettings) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer's class and options; raises SettingError for an option that it does not have."""
    kind = _kind(settings.optimizer)
    taken = inspect.signature(kind).parameters
    options: dict[str, Any] = {"lr": settings.lr}
    for name, value, without in (
        ("betas", settings.betas, None),
        ("eps", settings.eps, None),
        ("weight_decay", settings.weight_decay, 0.0),
    ):
        if name in taken and value is not None:
            options[name] = value
        elif value != without:
            raise SettingError(f"{name}={value!r}: torch.optim.{kind.__name__} has no {name}. Leave it out.")
    return kind, options


def _kind(name: str) -> type[torch.optim.Optimizer]:
    found = {
        word.lower(): kind
        for word, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    if name.lower() not in found:
        near = difflib.get_close_matches(name.lower(), found, n=len(found))
        near = sorted(near, key=lambda word: word != "adamw")[:3]  # the default first: many names are similar
        meant = f"Did you mean {' or '.join(near)}?" if near else f"Accepted: {', '.join(sorted(found))}."
        raise SettingError(f"optimizer={name!r} is not in torch.optim. {meant}")
    if name.lower() in _UNUSABLE:
        raise SettingError(f"optimizer={name} cannot be used: {_UNUSABLE[name.lower()]}. Use another, such as adamw.")
    return found[name.lower()]
