"""Our own methods. Everything that depends on the signature of ``stormtorch.offload_activations`` is in ``offload``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.training.methods import ADAMW, Work
from torch import Tensor, nn

from .stepping import Moved, Stepping


@dataclass(frozen=True, kw_only=True)
class Offload:
    """``around`` is entered for every forward and loss; ``report`` covers all steps since the beginning."""

    around: AbstractContextManager[object]
    report: Callable[[], Any]
    close: Callable[[], None]


def offload(model: nn.Module, *, vram: str, mode: str) -> Offload:
    stormtorch: Any = importlib.import_module("stormtorch")
    offloading = stormtorch.offload_activations(model, mode=mode, **({"vram": vram} if vram else {}))
    return Offload(around=offloading, report=offloading.report, close=offloading.close)


def moved(report: Any) -> Moved:
    """What storm counted itself: the means per step of its report, times the steps."""
    steps = max(report.steps, 1)
    return Moved(
        in_bytes=round(sum(report.bytes_in_per_step.values()) * steps),
        out_bytes=round(sum(report.bytes_out_per_step.values()) * steps),
        pinned_bytes=report.pinned_bytes,
    )


def offloaded(work: Work, *, mode: str) -> Stepping:
    """Forward and backward of a resident model whose activations storm holds."""
    storm = offload(work.model, vram=work.case.vram, mode=mode)

    def step() -> Tensor:
        with storm.around:
            loss = work.loss()
        loss.backward()
        work.model.zero_grad()
        return loss.detach()

    return Stepping(
        step=step, close=storm.close, report=lambda: str(storm.report()), moved=lambda: moved(storm.report())
    )


def streamed(work: Work) -> Stepping:
    """Training with parameters, gradients, optimizer and activations in the hands of storm."""
    stormtorch: Any = importlib.import_module("stormtorch")
    optimizer = torch.optim.AdamW(work.model.parameters(), **ADAMW)
    session = stormtorch.stream(
        work.model,
        optimizer,
        vram=work.case.vram,
        device=str(work.device),
        activations="auto",
        step=work.case.step,
    )

    def step() -> Tensor:
        loss = work.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Stepping(
        step=step,
        drain=session.synchronize,
        close=session.close,
        report=lambda: str(session.report()),
        moved=lambda: moved(session.report()),
    )
