"""Weights that a forward reads from a module without calling it, and hands to a ``torch.autograd.Function``.

Fused losses do so: TRL's and Liger's take ``lm_head.weight`` and call no ``lm_head``. While a module is not being
called, its parameter is the one in home memory. Functions of torch find its twin on the device by themselves, since the
parameter's class sees them; ``autograd.Function.apply`` does not tell that class. So the module itself hands out the
twin, as an attribute, while a forward of the streamed model runs: ``nn.Module`` looks into ``_parameters`` for it.
What walks over parameters (``parameters``, ``state_dict``, ``zero_grad``) uses ``items`` and sees the real ones.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...streams.home import HomeParameter


class _Twinned(dict[str, Any]):
    """The ``_parameters`` of a module."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if isinstance(value, HomeParameter) and hasattr(value, "_storm") and value._storm[0].in_forward():
            return value.view_as(value)
        return value


def hand_out_twins(model: nn.Module) -> None:
    """From now on, for every module of ``model``; its parameters must be streamed already."""
    for module in model.modules():
        if module._parameters:
            module._parameters = _Twinned(module._parameters)


def hand_out_parameters(model: nn.Module) -> None:
    """As it was before."""
    for module in model.modules():
        if isinstance(module._parameters, _Twinned):
            module._parameters = dict(module._parameters)
