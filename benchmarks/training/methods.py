"""Our own method and the ceiling: how a ready model becomes something that can be stepped."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.masters import MasterAdamW
from torch import Tensor, nn

from .cases import Case
from .workload import LanguageModel, loss_of

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
CLIP_NORM = 1.0


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a method is given: the model in RAM or, if it asked for that, on the device, and the batch on the device."""

    case: Case
    device: torch.device
    dtype: torch.dtype
    model: LanguageModel
    tokens: Tensor
    targets: Tensor

    def loss(self, model: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return loss_of((model or self.model)(self.tokens), self.targets)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a method gives back. ``step`` is one whole training step; ``drain`` returns when nothing is pending."""

    step: Callable[[], Tensor]
    drain: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing
    report: Callable[[], str] = str


@dataclass(frozen=True, kw_only=True)
class Method:
    start: Callable[[Work], Training]
    prepare: Callable[[Case], None] = lambda _case: None  # imports and compilation: in no case's set-up time
    full_precision: bool = False  # the model it is given is fp32, whatever the arithmetic
    on_device: bool = False
    checkpointing: bool = True


def resident(work: Work) -> Training:
    """The ceiling: bf16 weights, fp32 masters and AdamW all on the device."""
    weights = list(work.model.parameters())
    optimizer = MasterAdamW(weights, **ADAMW)

    def step() -> Tensor:
        loss = work.loss()
        loss.backward()
        if work.case.clip:
            nn.utils.clip_grad_norm_(weights, CLIP_NORM)
        optimizer.step()
        return loss.detach()

    return Training(step=step)


def storm(work: Work) -> Training:
    """The loop of the README: an ordinary model in RAM, an ordinary optimizer, one new line."""
    stormtorch: Any = importlib.import_module("stormtorch")
    optimizer = torch.optim.AdamW(work.model.parameters(), **ADAMW)
    given = {"vram": work.case.vram, "activations": work.case.activations}
    settings = {name: value for name, value in given.items() if value}
    session = stormtorch.stream(work.model, optimizer, device=str(work.device), step=work.case.step, **settings)

    def step() -> Tensor:
        loss = work.loss()
        loss.backward()
        if work.case.clip:
            session.clip_grad_norm_(CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(
        step=step,
        drain=getattr(session, "synchronize", _nothing),
        close=session.close,
        report=lambda: str(session.report()),
    )
