"""`StormTrainer`: Hugging Face's ``Trainer`` with the model streamed, and `storm_trainer` for every other trainer.

The trainer keeps its loop, its data, its logs and its files. A session opens when the optimizer exists, before
``accelerate`` prepares both, and closes when ``train`` ends, also by an error: the model is then an ordinary one in RAM
again. Evaluation outside ``train`` opens its own session. Four things differ from a plain trainer:

- only the session moves the model, the optimizer's state or the batches to the device: ``_move_model_to_device`` does
  nothing, and ``accelerator.device_placement`` is off (the trainer itself still moves each batch);
- the gradients' norm comes from the session, which has it when backward ends: ``accelerator.clip_grad_norm_``;
- the optimizer drops gradients before the trainer calls ``model.zero_grad()``. That reads each of them, and reading
  clipped gradients means waiting for the update and scaling them, for nothing;
- the optimizer's state comes from its file without a second copy in RAM (resume.py).

A callback alone cannot do the first of these; it is used for the third. The methods overridden here are those that all
trainers share, so that one class serves ``Trainer``, ``Seq2SeqTrainer`` and those of TRL.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from transformers import Trainer, TrainerCallback

from ...core.errors import StormError
from ...observe.report import Report
from ...session.api import Session, stream
from . import resume
from .settings import checked, keep_in_ram, refuse_arguments, refuse_model

_Base: Any = object


class Streaming(_Base):  # type: ignore[misc]  # a trainer follows in the method resolution order
    """A mixin for a trainer; put it before the trainer among the bases."""

    session: Session | None
    """Open during ``train``, ``evaluate`` and ``predict``."""
    _mixed_mesh_grads: bool | None
    storm_report: Report | None
    """The report of the last ``train`` that ended without an error."""

    def __init__(self, *args: Any, storm: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._storm = checked(storm)
        self._storm_trains = False
        self.session = self.storm_report = None
        keep_in_ram(super().__init__, args, kwargs)
        super().__init__(*args, **kwargs)
        refuse_model(self.model)

    # --- only the session moves the model

    def create_accelerator_and_postprocess(self) -> None:
        refuse_arguments(self.args, self._storm)
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise StormError(
                "A launcher (`accelerate launch`?) started this process for DeepSpeed or FSDP. Start it with python."
            )
        self.accelerator.device_placement = False
        self._plain_clip = self.accelerator.clip_grad_norm_
        self.accelerator.clip_grad_norm_ = self._storm_clip

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        pass

    # --- training

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:  # else the trainer takes the highest number, complete or not
            newest = resume.newest_complete(self.args.output_dir)
            resume_from_checkpoint = True if newest is None else str(newest)
        watch = _Watch(self)
        self.add_callback(watch)  # the last one: other callbacks may read the gradients first
        self._mixed_mesh_grads = False  # the trainer would read every gradient to find that out
        self._storm_trains = True
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)
            if self.session is not None:
                self.storm_report = self.session.report()
            return result
        finally:
            self._storm_trains = False
            self.remove_callback(watch)
            self._storm_close()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        result = super().create_optimizer(*args, **kwargs)
        if self._storm_trains and self.session is None:  # an open session is kept when a smaller batch is tried
            optimizer = self.optimizer
            while isinstance(optimizer, AcceleratedOptimizer):
                optimizer = optimizer.optimizer
            self._storm_open(optimizer)
        return result

    def _storm_clip(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        if self.session is None:
            return self._plain_clip(parameters, max_norm, norm_type=norm_type)
        if self._storm.get("step") == "backward" and max_norm == math.inf:
            return None  # only for the log; the gradients are used already
        self.accelerator.unscale_gradients()
        return self.session._clip(list(parameters), max_norm, float(norm_type))

    # --- evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self.session is not None:
            return super().evaluation_loop(*args, **kwargs)
        self._storm_open(None)
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self._storm_close()

    # --- resuming

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            resume.load_optimizer(checkpoint, self.optimizer, self.lr_scheduler)

    # --- inside

    def _storm_open(self, optimizer: Any) -> None:
        refuse_model(self.model)
        self.session = stream(self.model, optimizer, **{**self._storm, "device": self.args.device})

    def _storm_close(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.close()


class _Watch(TrainerCallback):
    """Checks that training is streamed, and drops gradients the cheap way."""

    def __init__(self, trainer: Streaming) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self._trainer.session is None:
            raise StormError("Nothing is streamed: your create_optimizer must call super().create_optimizer().")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._trainer.optimizer.zero_grad()


class StormTrainer(Streaming, Trainer):
    """``transformers.Trainer`` with its model streamed; ``storm={"vram": "8GiB"}``: the settings of `storm.stream`."""


@functools.cache
def storm_trainer(trainer: type[Trainer]) -> Any:
    """The class ``trainer`` (``SFTTrainer``, a class of your own, ...) with its model streamed, like `StormTrainer`.

    ``storm_trainer(SFTTrainer)(model=..., ..., storm={"vram": "8GiB"})``. One ``trainer`` always gives the same class.
    """
    if issubclass(trainer, Streaming):
        return trainer
    if trainer is Trainer:
        return StormTrainer
    return type(f"Storm{trainer.__name__}", (Streaming, trainer), {"__doc__": trainer.__doc__, "__module__": __name__})
