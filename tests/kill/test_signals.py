"""Law: a signal ends `storm train` with a checkpoint, or asks for one, in every phase of a run; nothing hangs, nothing
is lost, and what goes on afterwards gives the numbers of a run that no signal reached.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1, Signals
from typing import Any

import pytest

from .runs import DEMO_DATA, STEPS, Ended, Moment, Runs, Training, what_is_wrong, write_model

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

WEIGHTS = f"step-{STEPS:08d}/model.safetensors"


class Signalled:
    """Sends signals to runs of one model, evaluated every third step, and compares them with an undisturbed one."""

    def __init__(self, runs: Runs, folder: Path) -> None:
        self._runs, self._folder, self._count = runs, folder, 0
        first = Training(folder / "first", "fp32")
        assert runs.run(first.arguments(write_model(folder / "model"), steps=1), first.log).status == 0
        [self._model] = first.named_checkpoints()
        self._expected = self.begin()
        assert self.run(self._expected).status == 0, self._expected.log.read_text()

    def begin(self) -> Training:
        self._count += 1
        return Training(self._folder / f"run-{self._count}", "fp32")

    def run(self, training: Training, phase: str = "", count: int = 1, *signals: Signals) -> Ended:
        evaluation: dict[str, Any] = {"eval-data": DEMO_DATA / "corpus.jsonl", "eval-every": 3, "eval-batches": 2}
        moment = Moment(phase, count, signals=signals) if signals else None
        ended = self._runs.run(training.arguments(self._model, **evaluation), training.log, moment)
        for checkpoint in training.named_checkpoints():
            assert what_is_wrong(checkpoint) is None
        assert "Traceback" not in training.log.read_text()
        return ended

    def finish(self, training: Training) -> None:
        assert self.run(training).status == 0, training.log.read_text()
        self.compare(training)

    def compare(self, training: Training) -> None:
        assert training.steps() == self._expected.steps()
        assert (training.checkpoints / WEIGHTS).read_bytes() == (self._expected.checkpoints / WEIGHTS).read_bytes()
        assert not training.leftovers()


@pytest.fixture(scope="module")
def signalled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Signalled]:
    folder = tmp_path_factory.mktemp("signals")
    with Runs(folder) as runs:
        yield Signalled(runs, folder)


def records(training: Training, kind: str) -> list[int]:
    lines = map(json.loads, (training.output / "metrics.jsonl").read_text().splitlines())
    return [record["step"] for record in lines if record["kind"] == kind]


def saved(training: Training) -> list[int]:
    return [int(path.name[5:]) for path in training.named_checkpoints()]


def test_before_the_first_step_it_ends_and_nothing_is_lost(signalled: Signalled) -> None:
    training = signalled.begin()
    for phase, number in (("rows", SIGTERM), ("build", SIGINT), ("weights", SIGHUP)):
        assert signalled.run(training, phase, 1, number).status == 128 + number, training.log.read_text()
        assert f"Stopped by {number.name} before the first step" in training.log.read_text()
    assert signalled.run(training, "backward", 4, SIGTERM).status == 143  # in the second step
    assert saved(training) == [2]
    assert signalled.run(training, "load", 1, SIGTERM, SIGTERM).status == 143
    assert signalled.run(training, "read", 2, SIGINT).status == 130
    assert saved(training) == [2]
    signalled.finish(training)


def test_only_a_second_ctrl_c_ends_at_once(signalled: Signalled) -> None:
    training = signalled.begin()
    for count, signals, status in (
        (1, (SIGTERM, SIGINT), 143),
        (1, (SIGTERM, SIGTERM), 143),
        (1, (SIGHUP, SIGTERM, SIGINT), 129),
    ):
        before = saved(training)
        assert signalled.run(training, "backward", count, *signals).status == status
        assert saved(training)[-1] == (before or [0])[-1] + 1
    assert signalled.run(training, "backward", 1, SIGINT, SIGINT).status == 130
    assert signalled.run(training, "backward", 3, SIGTERM, SIGINT, SIGINT).status == 130
    assert saved(training)[-1] in (3, 4)  # 4 was on its way when the second run ended
    signalled.finish(training)


def test_sigusr1_saves_and_goes_on(signalled: Signalled) -> None:
    """Before the first step, in a step, in an evaluation, and while a checkpoint is being written."""
    for phase, count, step in (("rows", 1, 1), ("backward", 9, 5), ("evaluate", 1, 3), ("write", 1, 3)):
        training = signalled.begin()
        assert signalled.run(training, phase, count, SIGUSR1).status == 0, training.log.read_text()
        asked = sorted({*records(training, "save")} - {2, 4, 6})
        assert asked == [step] or (phase == "write" and len(asked) <= 1), (phase, asked)
        assert records(training, "evaluation") == [3, 6]
        signalled.compare(training)


def test_while_it_saves_or_evaluates(signalled: Signalled) -> None:
    training = signalled.begin()
    assert signalled.run(training, "evaluate", 1, SIGTERM).status == 143
    assert "The evaluation of step 3 was skipped" in training.log.read_text()
    assert saved(training) == [2, 3]
    assert signalled.run(training, "write", 3, SIGTERM).status == 143
    assert saved(training)[-1] >= 4
    training = signalled.begin()
    assert signalled.run(training, "write", 3, SIGINT, SIGINT).status == 130
    signalled.finish(training)
