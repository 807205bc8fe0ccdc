"""``module:callable``: models and losses of user code, found by name in the current directory or on the path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.errors import SettingError, StormError
from ..errors import reason_and_place

Batch = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, Batch], torch.Tensor]


def find_callable(name: str, *, setting: str) -> Callable[..., Any]:
    """Import ``module:callable``; searches the current directory too, as Python does."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise SettingError(f"{setting} {name!r} is not the name of a callable. Accepted: module:callable.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise SettingError(
            f"{setting} {name}: cannot import {module_name} ({error}). Is it in this directory?"
        ) from error
    except (Exception, SystemExit) as error:
        raise SettingError(f"{setting} {name}: importing {module_name} raised {reason_and_place(error)}.") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise SettingError(f"{setting} {name}: {module_name} has no callable {attribute!r}.")
    return found  # type: ignore[no-any-return]  # callable() was checked


def make_model(name: str, dtype: torch.dtype | None) -> nn.Module:
    """Call ``name`` without arguments; ``dtype`` None leaves the model as it was built."""
    make = find_callable(name, setting="--model")
    try:
        model = make()
    except StormError:
        raise
    except (Exception, SystemExit) as error:
        raise SettingError(
            f"--model {name}, which is called without arguments, raised {reason_and_place(error)}."
        ) from error
    if not isinstance(model, nn.Module):
        raise SettingError(f"--model {name} returned a {type(model).__name__}. Accepted: an nn.Module.")
    return model if dtype is None else model.to(dtype)


def own_loss(name: str | None) -> Loss:
    """A function that calls the model with a batch's fields and takes the loss from its output."""
    function = None if name is None else find_callable(name, setting="--loss")

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        output = model(**batch)
        found = _loss_of(output) if function is None else function(output, batch)
        if not isinstance(found, torch.Tensor):
            shown = type(found).__name__ if found is not None else f"not in the model's {type(output).__name__}"
        elif found.numel() != 1:
            shown = f"a tensor of shape {tuple(found.shape)}"
        elif found.requires_grad or not torch.is_grad_enabled():
            return found.reshape(())
        else:
            shown = "not computed from weights"
        raise SettingError(
            f"The loss is {shown}. Accepted: a tensor with one number that depends on the weights: what the model "
            "returns, its .loss, its entry 'loss', the first of a tuple, or from --loss module:callable(output, batch)."
        )

    return loss


def _loss_of(output: object) -> object:
    if isinstance(output, Mapping):
        return output.get("loss")
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, tuple) and output and not hasattr(output, "loss"):
        return output[0]
    return getattr(output, "loss", None)
