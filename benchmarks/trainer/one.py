"""One model and one method in this process, for each shape of batches and each budget in turn.

The process works only while it is told to: it reads a line before each of its turns, and prints a line of JSON after
it. So several methods, each in a process of its own, take turns on one machine (rounds.py). The first turn of each
shape and budget sets up as well, so that no process prepares anything while another one is measured.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from benchmarks.models.build import CONFIGS, build
from benchmarks.models.trainers import make
from torch import nn
from transformers import TrainerCallback

from stormtorch.observe.recorder import Mark
from stormtorch.observe.report import gpu_time

from .profiled import Profile, look

# What a user writes beside the trainer's defaults. "plain" and "plain-checkpoint" are the trainer of transformers, all
# in VRAM; "checkpoint" is its own gradient checkpointing, with the model streamed. "busy" is "auto" under
# torch.profiler: a process of its own, because the profiler may slow launches down even after it has ended.
METHODS: dict[str, tuple[dict[str, Any] | None, bool]] = {
    "plain": (None, False),
    "plain-checkpoint": (None, True),
    "auto": ({}, False),
    "recompute": ({"activations": "recompute"}, False),
    "offload": ({"activations": "offload"}, False),
    "checkpoint": ({}, True),
    "busy": ({}, False),
}
# Steps of the first turn, which is not measured. "auto" compares plans from the 8th step on, and again from the 64th,
# which comes after all turns; the shares of the optimizer settle.
_WARM = {"auto": 36}
_WARM_OTHERS, _STEPS, _PROFILED = 10, 4, 4


@dataclass
class Outcome:
    method: str
    turns_s: list[list[float]] = field(default_factory=list)  # the counted steps of each turn
    vram_bytes: int = 0
    reserved_bytes: int = 0
    reason: str = ""
    gpu: str = ""
    pool: str = ""
    busy: float = 0.0  # by our own report, in the steps that were profiled too
    profiled_busy: float = 0.0
    failed: str = ""


class Turns(TrainerCallback):
    """Lets the trainer run in turns, and times its steps, from the end of one to the end of the next on the device. The
    first step of a turn is not counted. After the last turn ``profiled`` steps run under the profiler."""

    def __init__(self, warm: int, steps: int, rounds: int, profiled: int) -> None:
        self.ends_at = [warm + number * steps for number in range(rounds + 1)]  # of turns, in steps
        self.last = self.ends_at[-1] + profiled
        self.turns_s: list[list[float]] = []
        self.busy = self.profiled_busy = 0.0
        self.gpu = self.reason = self.pool = ""
        self.marks: list[Any] = []
        self.profile: Profile | None = None
        self.turn: Mark | None = None
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        step = state.global_step
        self.marks.append(mark())
        if step in self.ends_at:
            _now()
            if torch.cuda.is_available():
                print(f"step {step}: at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", file=sys.stderr)
            if step > self.ends_at[0]:
                self.turns_s.append([between(a, b) for a, b in itertools.pairwise(self.marks)])
            self.marks = []
            if step == self.ends_at[-1]:
                self._report(look(self._session, self._own_meter()))
            if step < self.last:
                print(json.dumps({"turn": step}), flush=True)
                _wait_for_turn()
                _now()
                self.turn = look(self._session, self._own_meter())
                if step == self.ends_at[-1] and torch.cuda.is_available():
                    self.profile = Profile(self._session)
        if step == self.last and self.profile is not None:
            self.busy, self.profiled_busy = self.profile.end()

    @property
    def _session(self) -> Any:
        return getattr(self.trainer, "session", None)

    def _own_meter(self) -> Any:
        """The session's."""
        return None if self._session is None else self._session._parts.ground.idle

    def _report(self, now: Mark | None) -> None:
        """Note what became of the last turn. The session's own report counts the turns of others too."""
        session = self._session
        if session is not None:
            gpu = gpu_time([mark for mark in (self.turn, now) if mark is not None])
            report = session.report()
            self.gpu, self.reason = str(gpu or ""), report.plan.activations.reason
            self.pool = f"{report.pool_bytes / 2**30:.2f} GiB; {report.plan.optimizer.reason}"


def _wait_for_turn() -> None:
    if not sys.stdin.readline():
        sys.exit("nothing tells this process to go on")


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def mark() -> Any:
    """A moment on the device's clock, where there is one."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first: Any, second: Any) -> float:
    return float(first.elapsed_time(second) / 1e3 if torch.cuda.is_available() else second - first)


def trainer_of(
    model: nn.Module,
    callback: TrainerCallback,
    options: argparse.Namespace,
    *,
    steps: int,
    storm: dict[str, Any] | None,
    checkpointing: bool,
) -> Any:
    """A trainer with its defaults. ``storm``: settings beside the budget; None: the trainer of transformers."""
    vocabulary = CONFIGS[options.model][1]["vocab_size"]
    rows = torch.randint(vocabulary, (64, options.sequence), generator=torch.Generator().manual_seed(0))
    inner: Any = model
    inner.gradient_checkpointing_disable()
    return make(
        model,
        [{"input_ids": row, "labels": row} for row in rows],
        options.output,
        batch=options.batch,
        steps=steps,
        storm=None if storm is None else {"vram": options.vram, **storm},
        gradient_checkpointing=checkpointing,
        callbacks=[callback],
    )


def measured(model: nn.Module, method: str, options: argparse.Namespace) -> Outcome:
    storm, checkpointing = METHODS[method]
    warm = options.warm if options.warm is not None else _WARM.get(method, _WARM_OTHERS)
    is_profiled = method == "busy"
    clock = Turns(warm, options.steps, 0 if is_profiled else options.rounds, _PROFILED if is_profiled else 0)
    trainer = trainer_of(model, clock, options, steps=clock.last, storm=storm, checkpointing=checkpointing)
    clock.trainer = trainer
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        left = torch.cuda.memory_allocated()
        print(f"{method} {options.vram}: {left / 2**30:.1f} GiB were there before", file=sys.stderr)
    trainer.train()
    outcome = Outcome(method, turns_s=clock.turns_s, reason=clock.reason, gpu=clock.gpu, pool=clock.pool)
    outcome.busy, outcome.profiled_busy = clock.busy, clock.profiled_busy
    if torch.cuda.is_available():
        outcome.vram_bytes = torch.cuda.max_memory_allocated()
        outcome.reserved_bytes = torch.cuda.max_memory_reserved()
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--shapes", nargs="+", required=True, help="rows x tokens")
    parser.add_argument("--vram", nargs="+", required=True)
    parser.add_argument("--warm", type=int)
    parser.add_argument("--steps", type=int, default=_STEPS, help="of a turn")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    model: nn.Module | None = None
    for shape, vram in itertools.product(options.shapes, options.vram):
        _wait_for_turn()
        model = model if model is not None else build(options.model, dtype=torch.bfloat16)
        batch, sequence = (int(word) for word in shape.split("x"))
        cell = argparse.Namespace(**{**vars(options), "batch": batch, "sequence": sequence, "vram": vram})
        try:
            outcome = measured(model, options.method, cell)
        except Exception as error:  # a method that fails is a row of the table
            outcome = Outcome(options.method, failed=f"{type(error).__name__}: {error}"[:300])
        model.to("cpu")
        gc.collect()
        print(json.dumps({"outcome": asdict(outcome)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
