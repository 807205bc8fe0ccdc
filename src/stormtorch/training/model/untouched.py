"""Isolates work between steps from training: restores random numbers and the mode of the model."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn


@contextlib.contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run the block in eval mode without gradients; afterwards restore modes and all random generators."""
    modes = [(module, module.training) for module in model.modules()]
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []  # reading the state of another device would use its memory
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            random.setstate(python)
            np.random.set_state(numpy)
