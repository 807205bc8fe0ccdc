"""`storm train`, killed at each of its phases again and again, ends with the numbers of an undisturbed run.

``STORM_KILLS=60`` kills that often, at phases, counts and delays that the seed ``STORM_KILL_SEED`` decides; without it,
once in each phase that the suite has time for.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from .runs import KEEP, SAVE_EVERY, STEPS, Ended, Moment, Runs, Training, what_is_wrong, write_model

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

KILLS = int(os.environ.get("STORM_KILLS", "0"))
SEED = int(os.environ.get("STORM_KILL_SEED", "0"))
MICRO_BATCHES = 2 * STEPS
# How often a phase may have begun when the kill comes: so far into a run, or less.
OFTEN = {
    "prepare": 1,
    "rows": 1,
    "build": 1,
    "weights": 1,
    "load": 1,
    "read": 3,
    "forward": STEPS,
    "backward": MICRO_BATCHES,
    "step": STEPS,
    "between": STEPS,
    "save": STEPS // SAVE_EVERY,
    "write": 60,
    "sync": 30,
    "rename": STEPS // SAVE_EVERY,
    "renamed": STEPS // SAVE_EVERY,
    "remove": STEPS // SAVE_EVERY - KEEP,
}
WITH_A_CHECKPOINT, WITHOUT = ("load", "read"), ("rows", "weights")
IN_THE_SUITE = [
    Moment("rows"),
    Moment("weights"),
    Moment("backward", 6),  # in the third step, with the first checkpoint on its way or there
    Moment("write", 9),
    Moment("rename"),
    Moment("save", 2, 0.01),
    Moment("load"),
    Moment("forward", 2),
    Moment("step", 1, 0.001),
    Moment("remove", 1, 0.004),
]


class Killing:
    """Kills one training after the other, and checks what is left each time."""

    def __init__(self, runs: Runs, folder: Path) -> None:
        self._runs, self._folder = runs, folder
        self._model = self._with_weights()
        self._expected: dict[str, Training] = {}
        self.hits: Counter[str] = Counter()
        self.trainings = 0
        self.kills = 0

    def _with_weights(self) -> Path:
        """A model that has weights in files: the checkpoint of a short run."""
        training = Training(self._folder / "short", "fp32")
        arguments = training.arguments(write_model(self._folder / "model"), steps=1)
        assert self._runs.run(arguments, training.log).status == 0, training.log.read_text()
        [checkpoint] = training.named_checkpoints()
        return checkpoint

    def expected(self, kind: str) -> Training:
        """The training that no signal kills."""
        if kind not in self._expected:
            training = Training(self._folder / f"expected-{kind}", kind)
            assert self._run(training).status == 0, training.log.read_text()
            assert sorted(training.steps()) == list(range(1, STEPS + 1))
            self._expected[kind] = training
        return self._expected[kind]

    def begin(self, kind: str) -> Training:
        self.trainings += 1
        # A name as long as that of the expected one: the settings in a checkpoint hold it.
        return Training(self._folder / f"killed-{self.trainings:06d}", kind)

    def kill(self, training: Training, moment: Moment) -> bool:
        """Let it run until ``moment``; whether that came before the end."""
        ended = self._run(training, moment)
        if ended.status == 0:
            return False
        assert ended.status == -9, training.log.read_text()
        self.kills += 1
        self.hits.update(ended.hit)
        for checkpoint in training.named_checkpoints():
            assert what_is_wrong(checkpoint) is None, f"{moment} left {checkpoint}: {what_is_wrong(checkpoint)}"
        return True

    def finish(self, training: Training) -> None:
        """Let it run to its end, and compare it with the undisturbed one."""
        assert self._run(training).status == 0, training.log.read_text()
        expected = self.expected(training.kind)
        assert training.steps() == expected.steps()
        assert training.content() == expected.content()
        assert not training.leftovers()
        last = f"checkpoints/step-{STEPS:08d}"
        for file in (expected.output / last).rglob("*.safetensors"):
            name = file.relative_to(expected.output)
            assert (training.output / name).read_bytes() == file.read_bytes(), f"{name} differs"

    def _run(self, training: Training, moment: Moment | None = None) -> Ended:
        left, there = training.leftovers(), training.named_checkpoints()
        already = len(training.resumed()) if training.log.exists() else 0
        ended = self._runs.run(training.arguments(self._model), training.log, moment)
        if ended.phases:
            still = left & training.leftovers() if _swept(ended) else set()
            assert not still, f"left by a dead process, and still there: {still}"
        said = training.resumed()[already:]
        assert said == (there[-1:] if said else []), f"resumed from {said}, and there were {there}"
        if not there:
            assert not said
        elif ended.status == 0:
            assert len(said) == 1, "begun again, though there was a checkpoint"
        return ended


def _swept(ended: Ended) -> bool:
    """Whether the run came as far as removing what dead ones have left, of prepared data too."""
    return ended.phases.get("m", "prepare") not in ("prepare", "removed", "remove")


@pytest.mark.timeout(900 + 60 * KILLS)
def test_killed_runs_end_as_if_nobody_had_killed_them(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        killing = Killing(runs, tmp_path)
        if KILLS:
            _at_random(killing)
        else:
            training = killing.begin("bf16")
            for moment in IN_THE_SUITE:
                assert killing.kill(training, moment), f"{moment} did not come"
            killing.finish(training)
            exactly = {moment.phase for moment in IN_THE_SUITE if moment.delay_s is None}
            assert exactly <= set(killing.hits), killing.hits
    sys.stdout.write(f"\n{killing.kills} kills in {killing.trainings} trainings, while at: {dict(killing.hits)}\n")
    assert killing.kills >= max(KILLS, 5)


@pytest.mark.timeout(900)
def test_killed_runs_with_states_on_disk(tmp_path: Path) -> None:
    """Nothing of them is left in the directory."""
    with Runs(tmp_path) as runs:
        killing = Killing(runs, tmp_path)
        training = killing.begin("disk")
        for moment in (Moment("step", 2, 0.002), Moment("renamed"), Moment("load"), Moment("write", 9)):
            assert killing.kill(training, moment), f"{moment} did not come"
            assert not list(training.scratch.iterdir())
        killing.finish(training)
        assert "of optimizer states" in training.log.read_text()


def _at_random(killing: Killing) -> None:
    choices = random.Random(SEED)
    phases: list[str] = []
    kinds = ["bf16", "fp32", "disk"] + (["lora"] if importlib.util.find_spec("peft") is not None else [])
    training = killing.begin("bf16")
    while killing.kills < KILLS:
        if not phases:  # each phase as often as any other
            phases = choices.sample(sorted(OFTEN), len(OFTEN))
        phase = phases.pop()
        there = bool(training.named_checkpoints())
        if phase in WITHOUT and there:
            killing.finish(training)
            training = killing.begin(choices.choice(kinds))
        moment = Moment(phase, choices.randint(1, OFTEN[phase]), choices.choice([None, choices.uniform(0, 0.02)]))
        if phase in WITH_A_CHECKPOINT and not there:
            phases.append(phase)
            moment = Moment("renamed")  # just after the first one
        if not killing.kill(training, moment):  # it came to its end first
            killing.finish(training)
            training = killing.begin(choices.choice(kinds))
    killing.finish(training)
