"""All methods: those that hold activations in one way or another, and those that train within a limit."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

from benchmarks.training import peers
from benchmarks.training.methods import Method, Training, Work
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from .stepping import Stepping
from .storm import offloaded, streamed
from .trl import trl


def plain(work: Work, *, on_cpu: bool = False) -> Stepping:
    """Forward and backward as torch does them; with ``on_cpu`` all that is saved waits in pinned memory."""

    def step() -> Tensor:
        with save_on_cpu(pin_memory=True) if on_cpu else nullcontext():
            loss = work.loss()
        loss.backward()
        work.model.zero_grad()
        return loss.detach()

    return Stepping(step=step)


def ramtorch(work: Work, *, offload_activations: bool) -> Training:
    """As in ``benchmarks.training``, with the loss that the model gives; on request it offloads activations itself."""
    package: Any = importlib.import_module("ramtorch")
    configured = partial(package.OffloadModel, offload_activations=offload_activations)
    with patch.object(package, "OffloadModel", configured):
        training = peers.ramtorch(work)

    def step() -> Tensor:
        with patch.object(peers, "loss_of", lambda loss, _targets: loss):
            return training.step()

    return Training(step=step, close=training.close)


def _resident(start: Any, *, checkpointing: bool = False) -> Method:
    return Method(start=start, on_device=True, checkpointing=checkpointing)


def _ramtorch(*, offload_activations: bool) -> Method:
    known = peers.METHODS["ramtorch"]
    return Method(
        start=partial(ramtorch, offload_activations=offload_activations),
        prepare=known.prepare,
        full_precision=known.full_precision,
        checkpointing=known.checkpointing,
    )


HOLDING: dict[str, Method] = {
    "resident": _resident(plain),
    "checkpoint": _resident(plain, checkpointing=True),
    "save_on_cpu": _resident(partial(plain, on_cpu=True)),
    "trl": _resident(trl),
    "trl-checkpoint": _resident(trl, checkpointing=True),
    "storm-auto": _resident(partial(offloaded, mode="auto")),
    "storm-offload": _resident(partial(offloaded, mode="offload")),
}

TRAINING: dict[str, Method] = {
    "storm": Method(start=streamed, checkpointing=False),
    "fsdp2": peers.METHODS["fsdp2"],
    "ds3": peers.METHODS["ds3"],
    "ramtorch": _ramtorch(offload_activations=False),
    "ramtorch-offload": _ramtorch(offload_activations=True),
}

METHODS = HOLDING | TRAINING
