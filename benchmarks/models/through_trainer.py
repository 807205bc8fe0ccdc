"""Trains through ``Trainer`` of transformers, or `StormTrainer`, with their defaults."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from benchmarks.masters import MasterAdamW
from torch import nn
from transformers import TrainerCallback

from .by_hand import ADAMW, NORM
from .cases import MASTERED, RESIDENT, UNCLIPPED, Case
from .clock import Clock
from .trainers import make
from .work import Rows


class _Steps(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._clock.first()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if self._clock.end_step():
            control.should_training_stop = True


def train(case: Case, model: nn.Module, device: torch.device, known: dict[str, Any]) -> None:
    """Adds to ``known`` what was measured."""
    trainer: Any = None
    resident = case.method in RESIDENT
    clock = Clock(
        device,
        warm=case.warm,
        steps=case.steps,
        session=lambda: getattr(trainer, "session", None),
        metered=resident,
        known=known,
    )
    steps = Clock.most_steps(case.warm, case.steps)
    optimizer = None
    if case.method == MASTERED:
        optimizer = MasterAdamW(model.to(device).parameters(), max_norm=NORM, **ADAMW)
    storm: dict[str, Any] | None = {"vram": case.vram} if case.streams else None
    if case.method == "storm-backward":
        storm = {"vram": case.vram, "step": "backward"}
    arguments: dict[str, Any] = {"max_grad_norm": 0.0} if case.method in (*UNCLIPPED, MASTERED) else {}
    if case.method == "resident-checkpoint":
        arguments |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    with tempfile.TemporaryDirectory(prefix="models-") as output:
        trainer = make(
            model,
            Rows(case.config, case.sequence, case.rows * steps, getattr(torch, case.dtype)),
            output,
            batch=case.rows,
            steps=steps,
            storm=storm,
            callbacks=[_Steps(clock)],
            optimizer=optimizer,
            cpu=device.type == "cpu",
            **arguments,
        )
        plain = trainer.training_step

        def training_step(*given: Any, **named: Any) -> torch.Tensor:
            loss: torch.Tensor = plain(*given, **named)
            clock.loss(loss)  # the trainer's own log would wait for the device
            return loss

        trainer.training_step = training_step
        trainer.train()
