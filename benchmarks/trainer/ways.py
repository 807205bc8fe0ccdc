"""Lets one trainer handle activations in several ways, turn by turn, and times its steps."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import torch
from benchmarks.models.settled import is_settled, planning_of
from transformers import TrainerCallback

from stormtorch.streams.activations.plans.plan import ActivationPlan, recompute

from .host_time import HostTime, per_step
from .one import between, mark
from .profiled import Profile


class Ways(TrainerCallback):
    """Warms up until STORM has settled on a plan; then each way has a turn in each round, there and back; at last a few
    steps under the profiler. The first step of a turn is not counted."""

    def __init__(self, model: Any, *, warm: int, most_warm: int, steps: int, rounds: int) -> None:
        self._model, self._warm, self._most_warm, self._steps, self._rounds = model, warm, most_warm, steps, rounds
        self.profiled_steps = 0
        self.trainer: Any = None
        self.turns_s: dict[str, list[list[float]]] = {}
        self.host: dict[str, list[dict[str, float]]] = {}  # of each turn, per step, with the first one
        self._host_time: HostTime | None = None
        self._host_before: dict[str, float] = {}
        self.busy: tuple[float, float] | None = None  # by our own report, and by the profiler
        self.counts: dict[str, int] = {}  # of our meter
        self.reason = self.pool = ""
        self._plans: dict[str, ActivationPlan | None] = {}
        self._turns: list[str] = []  # the ways of the turns that are left, this one first
        self._marks: list[Any] = []
        self._ends_at: int | None = None  # the step that ends this turn
        self._profile: Profile | None = None

    @property
    def most_steps(self) -> int:
        return self._most_warm + 3 * self._steps * self._rounds + self.profiled_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        step = state.global_step
        if self._profile is not None:
            if step == self._ends_at:
                self.busy = self._profile.end()
                self.counts = self._profile.counts
                control.should_training_stop = True
            return
        self._marks.append(mark())
        if self._ends_at is None:
            if step >= self._warm and (is_settled(self.trainer.session) or step >= self._most_warm):
                self._begin()
                self._next(step)
        elif step == self._ends_at:
            _synchronize()
            assert self._host_time is not None
            counted, way = list(itertools.pairwise(self._marks))[1:], self._turns.pop(0)
            self.turns_s.setdefault(way, []).append([between(a, b) for a, b in counted])
            self.host.setdefault(way, []).append(per_step(self._host_before, self._host_time.now(), self._steps))
            self._next(step)
        if self._ends_at is not None and not self._turns and self._profile is None:
            control.should_training_stop = True

    def _planning(self) -> Any:
        return planning_of(self.trainer.session)

    def _begin(self) -> None:
        """Note the plans, and let STORM compare no more: a comparison would fall into a turn. Take the objects that
        exist now out of garbage collections, which would make one step in thirty twice as long."""
        gc.collect()
        gc.freeze()
        self._host_time = HostTime()
        report, planning = self.trainer.session.report(), self._planning()
        self.reason = report.plan.activations.reason
        self.pool = f"{report.pool_bytes / 2**30:.2f} GiB; {report.plan.optimizer.reason}"
        self._plans = {"auto": None if planning is None else planning.plan}
        if planning is not None and planning.plan is not None:
            planning.comparisons = 99
            profiles = planning.known.of(planning._planned)
            plan = recompute(profiles, planning._gauge.means(planning._planned, profiles, planning._held))
            if plan.blocks != planning.plan.blocks:
                self._plans["recompute"] = plan
        self._plans["checkpoint"] = self._plans["auto"]  # not used: the blocks are inside the user's checkpoints
        there = list(self._plans)
        self._turns = [way for number in range(self._rounds) for way in (there if number % 2 else reversed(there))]

    def _next(self, step: int) -> None:
        """Begin the next turn; after the last one, the profile."""
        way = self._turns[0] if self._turns else "auto"
        if way == "checkpoint":
            self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self._model.gradient_checkpointing_disable()
            planning = self._planning()
            if planning is not None:
                planning.plan = self._plans[way]
        self._marks = [mark()]
        if self._host_time is not None:
            if self._turns:
                self._host_before = self._host_time.now()
            else:
                self._host_time.close()
                self._host_time = None
                gc.unfreeze()
        self._ends_at = step + (self._steps if self._turns else self.profiled_steps)
        if not self._turns and torch.cuda.is_available():
            self._profile = Profile(self.trainer.session)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
