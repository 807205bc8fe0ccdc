"""Trains in a loop by hand: what `Trainer` does not fit, and the peers. Settings are the trainer's defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.masters import MasterAdamW
from benchmarks.training.fsdp2 import blocks_of, shard
from torch import nn

from .cases import MASTERED, RESIDENT, UNCLIPPED, Case
from .clock import Clock
from .work import Rows, loss_of

ADAMW: dict[str, Any] = {"lr": 5e-5, "weight_decay": 0.0}  # the trainer's defaults
NORM = 1.0


def train(case: Case, model: nn.Module, device: torch.device, known: dict[str, Any]) -> None:
    """Adds to ``known`` what was measured."""
    session: Any = None
    steps = Clock.most_steps(case.warm, case.steps)
    rows = Rows(case.config, case.sequence, case.rows * steps, getattr(torch, case.dtype))
    clock = Clock(
        device,
        warm=case.warm,
        steps=case.steps,
        session=lambda: session,
        metered=case.method in RESIDENT,
        known=known,
    )
    close: Callable[[], None] | None = None
    if case.method in ("resident-checkpoint", "fsdp2"):
        checkpoint(model)
    if case.method == "fsdp2":
        shard((*blocks_of(model), model), device, getattr(torch, case.dtype))
        close = dist.destroy_process_group
    if case.method in RESIDENT:
        model.to(device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer
    if case.method == MASTERED:
        optimizer = MasterAdamW(trained, max_norm=NORM, **ADAMW)
    else:
        optimizer = torch.optim.AdamW(trained, fused=True, **ADAMW)
    if case.streams:
        import stormtorch as storm

        settings: dict[str, Any] = {"step": "backward"} if case.method == "storm-backward" else {}
        session = storm.stream(model, optimizer, vram=case.vram, device=device, **settings)
        close = session.close
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, steps - step) / steps)
    for _ in range(steps):
        clock.first()
        loss = loss_of(model, rows.batch(case.rows, device))
        loss.backward()
        if case.method not in (*UNCLIPPED, MASTERED):
            if session is not None:
                session.clip_grad_norm_(NORM)
            else:
                nn.utils.clip_grad_norm_(trained, NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        clock.loss(loss)
        if clock.end_step():
            break
    if close is not None:
        close()


def checkpoint(model: Any) -> None:
    """Switch the model's own gradient checkpointing on."""
    if hasattr(model, "gradient_checkpointing_enable"):  # transformers, and peft around it
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.enable_gradient_checkpointing()  # diffusers: not reentrant
