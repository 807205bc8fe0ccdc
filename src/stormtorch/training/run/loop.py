"""The training loop: a step, and the work between two steps.

The host runs at most two steps ahead of the device: enough to hide its own work, and a Ctrl-C or a bad loss is noticed
soon. The loop checks losses as they arrive. Before a checkpoint it waits for all of them, and if no gradient norm was
computed, or a step was skipped, it checks the weights too: it never saves a state with NaN.

Between steps, evaluation and samples come before the save, so that the metrics up to a checkpoint are complete when a
run resumes from it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...core.errors import StormError
from ...core.tags import Tier
from ...data.loader import DataLoader
from ..model.own_model import Batch
from ..output.checkpoints import Checkpoints
from ..output.metrics import Metrics
from ..reporting import Pace, Status, Watcher, peaks
from ..settings.train_settings import TrainSettings, learning_rate
from .losses import evaluate, forward_backward, sample
from .open_model import Opened
from .readings import Reading, Readings
from .stopping import Stopping
from .text_data import TextData

_AHEAD = 2  # the most steps that the host is ahead of the device
_MAX_SKIPPED = 10  # in a row: then the weights are bad, not the data
_PIECE = 1 << 24  # elements at a time: `isfinite` makes a tensor of as many


class NotFinite(StormError):
    """A step gave a value that is not finite; no weights that it changed were saved."""


@dataclass(kw_only=True)
class Loop:
    """The parts of a run. ``run`` trains from the step after ``done`` to the last."""

    settings: TrainSettings
    opened: Opened
    data: TextData
    loader: DataLoader
    eval_loader: DataLoader | None
    checkpoints: Checkpoints
    metrics: Metrics
    watcher: Watcher
    stopping: Stopping
    done: int
    _pace: Pace = field(default_factory=Pace, init=False)
    _last: Reading | None = field(default=None, init=False)
    _skipped_in_row: int = field(default=0, init=False)
    _suspect: bool = field(default=False, init=False)  # whether to check the weights before the next save

    def __post_init__(self) -> None:
        self.session, self._model, self._loss = self.opened.session, self.opened.built.model, self.opened.built.loss
        self.total = self.data.total
        self.tokens_per_step = self.settings.batch * self.settings.sequence * self.settings.accumulate

    def run(self) -> bool:
        """Train; returns whether the last step is saved. Raises NotFinite. A signal ends it after the current step."""
        # Closed here: Python ignores a Ctrl-C that comes while it drops a generator.
        with (
            contextlib.closing(iter(self.loader)) as batches,
            Readings(self.session.device, self.session.ledger) as self._readings,
        ):
            while self.done < self.total and self.stopping.signal is None:
                self._step(self.done + 1, batches)
                self.done += 1
                self._after_step(last=self.done == self.total)
            if self.stopping.signal is not None:
                self._save_last()
        step_s = self._pace.mean_step_s
        self._write(
            "end",
            self.done,
            steps=self._pace.steps,
            tokens_per_s=None if not step_s else round(self.tokens_per_step / step_s, 1),
            **peaks(self.session),
        )
        return self._is_saved

    def _step(self, step: int, batches: Iterator[Batch]) -> None:
        settings, optimizer = self.settings, self.opened.optimizer
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step, self.total)
        given = [next(batches) for _ in range(settings.accumulate)]
        loss = forward_backward(self._model, self._loss, given, by_tokens=self.opened.built.by_tokens)
        norm = None
        if settings.clip or settings.on_nan == "skip":  # at inf it computes the norm, and clips nothing
            norm = self.session.clip_grad_norm_(settings.clip or math.inf)
        self._readings.put(step, loss, norm)
        if settings.on_nan == "stop" or not self._skipped():
            optimizer.step()
        optimizer.zero_grad()
        self._pace.step_ended()
        self._note(self._readings.all_but(_AHEAD))
        self.watcher.show(self._status(step))

    def _skipped(self) -> bool:
        """Wait for this step's numbers; returns whether to skip its update."""
        skip = False
        for reading in self._readings.all():
            problem = reading.problem()
            if problem is None:
                self._record(reading)
                self._skipped_in_row = 0
            else:
                skip = self._suspect = True
                self._skipped_in_row += 1
                self.watcher.warn(f"Skipped step {reading.step}: {problem}.")
                self._write("skip", reading.step, reason=problem)
                if self._skipped_in_row == _MAX_SKIPPED:
                    raise self._not_finite(reading.step, f"{problem}, for the {_MAX_SKIPPED}th time in a row")
        return skip

    def _after_step(self, *, last: bool) -> None:
        settings, step = self.settings, self.done
        self.checkpoints.poll()
        with self._pace.pause():
            self._save_on_signal()  # before an evaluation: a scheduler that sends a signal does not wait long
            try:
                if self.eval_loader is not None and _due(step, settings.eval_every, last):
                    self._evaluate(self.eval_loader)
                if settings.sample_prompts and _due(step, settings.sample_every, last):
                    self._sample()
            except Exception:  # e.g. out of memory: keep the work so far
                self._save_last()
                raise
            if self.stopping.signal is not None:
                return  # ``run`` saves at once: the sender of a signal may kill the run soon
            if last:
                self._save_last()
            elif _due(step, settings.save_every, last) or self.stopping.take_save():
                self._save()

    @property
    def _is_saved(self) -> bool:
        """Whether the last step is saved or being saved."""
        return self.checkpoints.step == self.done

    def _save_on_signal(self) -> None:
        """Start the checkpoint that SIGUSR1 requests."""
        if self.stopping.signal is None and self.stopping.take_save():
            self._save()

    def _save_last(self) -> None:
        """At the end, save the last step, and wait for it."""
        self._note(self._readings.all())
        if self._is_saved:
            self.checkpoints.finish()
        self._save(wait=True)

    def _save(self, *, wait: bool = False) -> None:
        """Save the last step, unless it is saved or being saved."""
        if self._is_saved:
            return
        self._note(self._readings.all())
        step, also = self.done, {"loader": self.loader}
        problem = _problem_in(self._model) if self._suspect or not self.settings.clip else None
        if problem is not None:
            raise self._not_finite(step, problem)
        self._suspect = False
        self.checkpoints.save(step, also, wait=wait)
        if not self._is_saved and step == self.total and self.settings.save_optimizer:
            self.checkpoints.save_weights_alone(step, also)

    def _evaluate(self, batches: DataLoader) -> None:
        loss = None
        while loss is None:
            batches.set_epoch(0)
            loss = evaluate(
                self._model,
                self._loss,
                batches,
                limit=self.settings.eval_batches,
                device=self.session.device,
                stop=lambda: self.stopping.signal is not None or self.stopping.save_asked,
            )
            if self.stopping.signal is not None and loss is None:
                self.watcher.warn(f"The evaluation of step {self.done} was skipped.")
                return
            self._save_on_signal()  # random generators are not the run's during an evaluation: it starts again
        self._write("evaluation", self.done, loss=loss if math.isfinite(loss) else None)
        self.watcher.say(f"step {self.done}: loss {loss:.4f} on the evaluation data")

    def _sample(self) -> None:
        for prompt in self.settings.sample_prompts or ():
            if self.stopping.signal is not None:
                self.watcher.warn(f"The samples of step {self.done} were skipped.")
                return
            self._save_on_signal()
            tokens, device = self.settings.sample_tokens, self.session.device
            text = sample(self._model, self.data.tokenizer, prompt, tokens=tokens, device=device)
            self._write("sample", self.done, prompt=prompt, text=text)
            self.watcher.say(f"step {self.done}: {prompt!r} -> {text!r}")

    def _note(self, readings: list[Reading]) -> None:
        """Check and record numbers that have arrived; raises NotFinite at the first bad one."""
        for reading in readings:
            problem = reading.problem()
            if problem is not None:
                raise self._not_finite(reading.step, problem)
            self._record(reading)

    def _not_finite(self, step: int, problem: str) -> NotFinite:
        self._write("nan", step, reason=problem)
        self.checkpoints.finish()
        good = self.checkpoints.last
        kept = f"The last good checkpoint is {good}" if good is not None else "There is no checkpoint yet"
        other = "" if self.settings.on_nan == "skip" else ", or use --on-nan skip"
        return NotFinite(f"Step {step}: {problem}. {kept}. Lower --lr, check the data{other}.")

    def _record(self, reading: Reading) -> None:
        self._last = reading
        if not (_due(reading.step, self.settings.log_every, reading.step == self.total) or reading.step == 1):
            return
        status = self._status(reading.step)
        self._write(
            "step",
            reading.step,
            loss=reading.loss,
            grad_norm=reading.norm,
            lr=learning_rate(self.settings, reading.step, self.total),
            tokens=reading.step * self.tokens_per_step,
            tokens_per_s=None if status.tokens_per_s is None else round(status.tokens_per_s, 1),
            vram_bytes=status.vram_bytes,
            ram_bytes=status.ram_bytes,
        )
        self.watcher.log(status)

    def _write(self, kind: str, step: int, **values: Any) -> None:
        problem = self.metrics.write(kind, step, **values)
        if problem is not None:
            self.watcher.warn(f"{problem} Training goes on without metrics.")

    def _status(self, step: int) -> Status:
        ledger, device = self.session.ledger, self.session.device
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        step_s = self._pace.step_s
        return Status(
            step=step,
            total=self.total,
            loss=None if self._last is None else self._last.loss,
            tokens_per_s=None if not step_s else self.tokens_per_step / step_s,
            left_s=None if step_s is None else step_s * (self.total - step),
            vram_bytes=max(ledger.used_bytes(Tier.DEVICE), held),
            vram_limit_bytes=ledger.budgets[Tier.DEVICE].limit_bytes,
            ram_bytes=ledger.used_bytes(Tier.HOST),
            ram_limit_bytes=ledger.budgets[Tier.HOST].limit_bytes,
            on_gpu=device.type == "cuda",
        )


def _due(step: int, every: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)


def _problem_in(model: nn.Module) -> str | None:
    """The first trained weight with a value that is not finite, as text; one pass over RAM."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            flat = parameter.detach().reshape(-1)
            if not all(bool(torch.isfinite(piece).all()) for piece in flat.split(_PIECE)):
                return f"{name} is not finite any more"
    return None
