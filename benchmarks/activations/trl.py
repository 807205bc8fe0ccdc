"""TRL's activation offloading, from the one file of its wheel that is needed."""

from __future__ import annotations

import importlib.util
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.training.packages import folder
from torch import Tensor

from .model import LossWork
from .stepping import Stepping

_FILE = "trl/models/activation_offloading.py"


def load() -> ModuleType:
    """The module by its path, as the package would import half of Hugging Face's.

    It takes a logger, a comparison of versions and a question about NPUs from there; stand-ins answer while it loads.
    """
    path = folder() / _FILE
    if not path.is_file():
        raise FileNotFoundError(f"no {_FILE} in {folder()}; STORM_PEERS names the folder")
    stand_ins: dict[str, Any] = {
        "accelerate": SimpleNamespace(),
        "accelerate.logging": SimpleNamespace(get_logger=logging.getLogger),
        "accelerate.utils": SimpleNamespace(),
        "accelerate.utils.versions": SimpleNamespace(is_torch_version=lambda _operation, _version: True),
        "transformers": SimpleNamespace(is_torch_npu_available=lambda: False),
    }
    spec = importlib.util.spec_from_file_location("trl_activation_offloading", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, stand_ins):
        spec.loader.exec_module(module)
    return module


def trl(work: LossWork) -> Stepping:
    """Its documented settings, around forward and backward as in its own trainers."""
    if torch.accelerator.current_accelerator() is None:
        raise NotImplementedError("TRL offloads from an accelerator, and there is none")
    gpu = work.device.type == "cuda"
    around = load().get_act_offloading_ctx_manager(work.model, use_pin_memory=gpu, use_streams=gpu)

    def step() -> Tensor:
        with around:
            loss = work.loss()
            loss.backward()
        work.model.zero_grad()
        return loss.detach()

    return Stepping(step=step)
