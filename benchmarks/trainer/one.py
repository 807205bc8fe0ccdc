"""One model in this process: for each shape of batches and each budget several methods, one after the other.

Each gets a trainer of its own over the same model. For each shape and budget a line of JSON is printed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import Trainer, TrainerCallback, TrainingArguments

from stormtorch.integrations.huggingface import StormTrainer
from stormtorch.observe.recorder import Mark
from stormtorch.observe.report import gpu_time

from .models import CONFIGS, build
from .profiled import busy_s, events_of

# What a user writes beside the trainer's defaults. "plain" and "plain-checkpoint" are the trainer of transformers, all
# in VRAM; "checkpoint" is its own gradient checkpointing, with the model streamed.
METHODS: dict[str, tuple[dict[str, Any] | None, bool]] = {
    "plain": (None, False),
    "plain-checkpoint": (None, True),
    "auto": ({}, False),
    "recompute": ({"activations": "recompute"}, False),
    "offload": ({"activations": "offload"}, False),
    "checkpoint": ({}, True),
}
# Steps before the measured ones. "auto" compares plans from the 8th step on; the optimizer's shares settle.
_WARM = {"auto": 25}
_WARM_OTHERS, _STEPS, _PROFILED = 8, 6, 4


@dataclass
class Outcome:
    method: str
    step_s: float = 0.0
    vram_bytes: int = 0
    reserved_bytes: int = 0
    reason: str = ""
    gpu: str = ""
    busy: float = 0.0  # by our own report, in the steps that were profiled too
    profiled_busy: float = 0.0
    failed: str = ""


class Clock(TrainerCallback):
    """Times steps, from the end of one to the end of the next on the device, and profiles those that follow. The median
    counts: now and then a step of any method takes longer, and says nothing of the method."""

    def __init__(self, warm: int, steps: int, profiled: int) -> None:
        self.warm, self.steps, self.profiled = warm, steps, profiled
        self.last = warm + steps + profiled
        self.step_s = self.busy = self.profiled_busy = 0.0
        self.gpu = self.reason = ""
        self.began_s = 0.0
        self.ends: list[Any] = []
        self.profiler: Any = None
        self.seen: Mark | None = None
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if self.warm <= state.global_step <= self.warm + self.steps:
            self.ends.append(_mark())
        if state.global_step == self.warm + self.steps:
            _now()
            self.step_s = statistics.median(_between(a, b) for a, b in itertools.pairwise(self.ends))
            self._report()
            if self.profiled and torch.cuda.is_available():
                self.profiler = profile(activities=[ProfilerActivity.CUDA])
                self.profiler.__enter__()
                self.began_s, self.seen = _now(), self._look()
        if state.global_step == self.last and self.profiler is not None:
            seconds, seen = _now() - self.began_s, self._look()
            self.profiler.__exit__(None, None, None)
            self.profiled_busy = busy_s(events_of(self.profiler)) / seconds
            gpu = gpu_time([mark for mark in (self.seen, seen) if mark is not None])
            self.busy = gpu.busy if gpu is not None else 0.0

    def _look(self) -> Mark | None:
        """Our own figures just now."""
        session = getattr(self.trainer, "session", None)
        if session is None:
            return None
        ground = session._parts.ground
        ground.waits.emit()
        asked, idle = ground.idle.read() if ground.idle is not None else (0, 0.0)
        waited_s = sum(ground.recorder.snapshot().waits_s.values())
        return Mark(at_s=time.perf_counter(), waited_s=waited_s, asked=asked, idle=idle)

    def _report(self) -> None:
        session = getattr(self.trainer, "session", None)
        if session is not None:
            report = session.report()
            self.gpu, self.reason = str(report.gpu or ""), report.activation_reason


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _mark() -> Any:
    """A moment on the device's clock, where there is one."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Any, second: Any) -> float:
    return float(first.elapsed_time(second) / 1e3 if torch.cuda.is_available() else second - first)


def measured(model: nn.Module, method: str, options: argparse.Namespace) -> Outcome:
    storm, checkpointing = METHODS[method]
    warm = options.warm if options.warm is not None else _WARM.get(method, _WARM_OTHERS)
    clock = Clock(warm, options.steps, _PROFILED if method == "auto" else 0)
    vocabulary = CONFIGS[options.model][1]["vocab_size"]
    rows = torch.randint(vocabulary, (64, options.sequence), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        output_dir=options.output,
        per_device_train_batch_size=options.batch,
        max_steps=clock.last,
        gradient_checkpointing=checkpointing,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    settings: dict[str, Any] = {
        "model": model,
        "args": arguments,
        "train_dataset": [{"input_ids": row, "labels": row} for row in rows],
        "callbacks": [clock],
    }
    inner: Any = model
    inner.gradient_checkpointing_disable()
    trainer = Trainer(**settings) if storm is None else StormTrainer(**settings, storm={"vram": options.vram, **storm})
    clock.trainer = trainer
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    outcome = Outcome(method, step_s=clock.step_s, reason=clock.reason, gpu=clock.gpu)
    outcome.busy, outcome.profiled_busy = clock.busy, clock.profiled_busy
    if torch.cuda.is_available():
        outcome.vram_bytes = torch.cuda.max_memory_allocated()
        outcome.reserved_bytes = torch.cuda.max_memory_reserved()
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("methods", nargs="+", choices=METHODS)
    parser.add_argument("--shapes", nargs="+", required=True, help="rows x tokens")
    parser.add_argument("--vram", nargs="+", required=True)
    parser.add_argument("--warm", type=int)
    parser.add_argument("--steps", type=int, default=_STEPS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    model = build(options.model, dtype=torch.bfloat16)
    for shape in options.shapes:
        for vram in options.vram:
            batch, sequence = (int(word) for word in shape.split("x"))
            cell = argparse.Namespace(**{**vars(options), "batch": batch, "sequence": sequence, "vram": vram})
            found = _cell(model, cell)
            print(json.dumps({"shape": shape, "vram": vram, "outcomes": [asdict(each) for each in found]}), flush=True)
    return 0


def _cell(model: nn.Module, options: argparse.Namespace) -> list[Outcome]:
    """All methods, with one shape of batches and one budget."""
    found: dict[str, Outcome] = {}
    for number in range(options.rounds):  # there and back, so that no method is always the first
        for method in options.methods if number % 2 == 0 else reversed(options.methods):
            try:
                outcome = measured(model, method, options)
            except Exception as error:  # a method that fails is a row of the table
                outcome = Outcome(method, failed=f"{type(error).__name__}: {error}"[:300])
            model.to("cpu")
            gc.collect()
            before = found.get(method)
            if before is None or outcome.failed or (not before.failed and outcome.step_s < before.step_s):
                found[method] = outcome  # the faster one: what slows a host down comes from outside
            print(f"{options.batch}x{options.sequence} {options.vram} {outcome}", file=sys.stderr, flush=True)
    return [found[method] for method in options.methods]


if __name__ == "__main__":
    sys.exit(main())
