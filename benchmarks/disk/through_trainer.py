"""STORM through the trainer of transformers: its defaults, with its gradient checkpointing."""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.models.build import CONFIGS, build, parameters_of
from benchmarks.models.trainers import make
from transformers import TrainerCallback

from stormtorch.session.api import Session
from stormtorch.streams.settings import Trial

from .cases import Case
from .figures import Figures, anonymous_bytes

_MODELS = {"tiny": "tiny", "3b": "llama-3b", "7b": "llama-7b"}
_SEQUENCE = {"tiny": 128}
_ROWS = 64


class _Clock(TrainerCallback):
    """Times the steps after the warm ones, from a moment when nothing is pending to another one."""

    def __init__(self, warm: int, steps: int) -> None:
        self._warm, self._last = warm, warm + steps
        self.trainer: Any = None
        self.marks_s = list[float]()  # from the end of the warm steps on; the last one with all that was pending
        self.report: Any = None
        self.anonymous_bytes = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        session = self.trainer.session
        if state.global_step in (self._warm, self._last):
            session.synchronize()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        if state.global_step >= self._warm:
            self.marks_s.append(time.perf_counter())
        if state.global_step == self._last:
            self.report, self.anonymous_bytes = session.report(), anonymous_bytes()
            print(self.report, session.plan, sep="\n", flush=True)


def measure(case: Case, options: argparse.Namespace, folder: Path) -> Figures:
    if options.size not in _MODELS:
        raise ValueError(f"--size {options.size}: a case through Trainer has {', '.join(_MODELS)}")
    name, sequence, on_gpu = _MODELS[options.size], _SEQUENCE.get(options.size, 2048), options.device == "cuda"
    model: Any = build(name, dtype=torch.bfloat16 if on_gpu else torch.float32)
    count = parameters_of(model)
    vocabulary = CONFIGS[name][1]["vocab_size"]
    rows = torch.randint(vocabulary, (_ROWS, sequence), generator=torch.Generator().manual_seed(0))
    disk = {"disk": str(folder), "ram": options.ram} if case.part is not None else {}
    clock = _Clock(options.warm, options.steps)
    trainer = make(
        model,
        [{"input_ids": row, "labels": row} for row in rows],
        str(folder / "trainer"),
        batch=options.micro_batch,
        steps=options.warm + options.steps,
        storm={"vram": options.vram if on_gpu else "64MiB", **disk},
        callbacks=[clock],
        cpu=not on_gpu,
        gradient_accumulation_steps=options.accumulate,
        gradient_checkpointing=True,
    )
    clock.trainer = trainer
    # The trainer opens the session itself. No setting of users asks for more on disk than RAM is short of.
    assert Session.__init__.__kwdefaults__ is not None
    Session.__init__.__kwdefaults__["trial"] = Trial(disk_part=case.part or 0.0)
    mean_loss = trainer.train().training_loss
    found = clock.report.disk
    return Figures(
        parameters=count,
        tokens=options.accumulate * options.micro_batch * sequence,
        step_s=(clock.marks_s[-1] - clock.marks_s[0]) / options.steps,
        times=[end - start for start, end in itertools.pairwise(clock.marks_s)],
        losses=[mean_loss],
        read_bytes=0 if found is None else found.read_bytes,
        written_bytes=0 if found is None else found.written_bytes,
        hidden=None if found is None else found.hidden,
        anonymous_bytes=clock.anonymous_bytes,
    )
