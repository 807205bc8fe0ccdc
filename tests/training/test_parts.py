"""The smaller parts of a run, each by itself."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stormtorch.core.errors import SettingError, StorageError
from stormtorch.memory.books.ledger import Ledger
from stormtorch.training.errors import require
from stormtorch.training.model.optimizer import make_optimizer
from stormtorch.training.model.untouched import untouched
from stormtorch.training.output.metrics import Metrics, cut_back
from stormtorch.training.reporting import Pace
from stormtorch.training.run import loop
from stormtorch.training.run.losses import forward_backward
from stormtorch.training.run.readings import Readings
from stormtorch.training.settings.train_settings import TrainSettings

from .tiny import OwnModel, Quiet, checkpoint, losses, one_thread, records, run, settings, steps_saved, write_text  # noqa: F401


def test_metrics_are_cut_back_to_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"kind": "step", "step": step}) for step in range(1, 6)]
    path.write_text("\n".join([*lines, '{"kind": "step", "step": 2', "[1]"]))
    cut_back(path, 3)
    assert path.read_text().splitlines() == lines[:3]
    assert list(tmp_path.iterdir()) == [path]
    cut_back(tmp_path / "absent.jsonl", 3)


class FullDisk:
    def write(self, _: str) -> int:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        pass


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path: Path) -> None:
    with Metrics(tmp_path / "metrics.jsonl", tensorboard=None, purge_step=1) as metrics:
        metrics._file.close()
        metrics._file = FullDisk()  # type: ignore[assignment]
        first, second = metrics.write("step", 1, loss=1.0), metrics.write("step", 2, loss=1.0)
    assert isinstance(first, StorageError)
    assert "metrics.jsonl" in str(first)
    assert second is None


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    events: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    chosen = settings(tmp_path, tensorboard=True, steps=3)
    assert run(chosen) == 0
    board = events.EventAccumulator(str(Path(chosen.output) / "tensorboard"))
    board.Reload()
    shown = {event.step: event.value for event in board.Scalars("step/loss")}
    assert shown == pytest.approx(losses(chosen))


def test_readings_come_in_order_and_none_is_lost(device: torch.device, ledger: Ledger) -> None:
    readings, found = Readings(device, ledger), []
    for step in range(1, 601):  # more than there are slots
        norm = torch.tensor(float(step), device=device) if step % 2 else None
        readings.put(step, torch.tensor(step / 3, device=device), norm)
        found += readings.all_but(2)
    found += readings.all()
    assert [reading.step for reading in found] == list(range(1, 601))
    assert [reading.loss for reading in found] == [float(torch.tensor(step / 3)) for step in range(1, 601)]
    assert [reading.norm for reading in found] == [float(step) if step % 2 else None for step in range(1, 601)]
    readings.put(601, torch.tensor(float("nan"), device=device), None)
    [last] = readings.all()
    assert last.problem() == "the loss is nan"
    readings.close()


def test_the_pace_leaves_pauses_out() -> None:
    now = [0.0]
    pace = Pace(clock=lambda: now[0], window=2)
    assert pace.step_s is None
    for seconds in (5.0, 1.0, 1.0):
        now[0] += seconds
        pace.step_ended()
        with pace.pause():
            now[0] += 100.0
    assert pace.step_s == 1.0


def test_what_happens_in_between_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2))
    model[2].eval()
    states = random.getstate(), np.random.get_state(legacy=False)["state"], torch.get_rng_state()
    with untouched(model, torch.device("cpu")):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        random.random(), np.random.rand(), torch.rand(1)
    assert [module.training for module in model] == [True, True, False]
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], states[1]["key"])
    assert torch.equal(torch.get_rng_state(), states[2])


def test_batches_of_a_step_count_by_their_tokens() -> None:
    """Gradients of two uneven batches equal those of all their tokens at once."""
    torch.manual_seed(0)
    model = OwnModel()
    ids = torch.randint(0, 257, (2, 16))
    labels = ids.clone()
    labels[0, :12] = -100

    def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = model(**batch)["loss"]
        return found

    whole = forward_backward(model, loss_of, [{"input_ids": ids, "labels": labels}], by_tokens=True)
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    rows = [{"input_ids": ids[row : row + 1], "labels": labels[row : row + 1]} for row in range(2)]
    parts = forward_backward(model, loss_of, rows, by_tokens=True)
    assert float(parts) == pytest.approx(float(whole), rel=1e-6)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    model.zero_grad()
    alike = forward_backward(model, loss_of, rows, by_tokens=False)
    assert float(alike) != pytest.approx(float(whole), rel=1e-4)


def test_optimizers_by_name_with_what_they_take() -> None:
    model = nn.Linear(4, 4)
    adam = make_optimizer(model, TrainSettings(optimizer="Adam", betas=(0.5, 0.6), eps=1e-3, lr=2.0))
    assert type(adam) is torch.optim.Adam
    assert {name: adam.param_groups[0][name] for name in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 2.0,
        "betas": (0.5, 0.6),
        "eps": 1e-3,
        "weight_decay": 0.0,
    }
    decayed = make_optimizer(model, TrainSettings(weight_decay=0.1))
    assert [(len(g["params"]), g["weight_decay"]) for g in decayed.param_groups] == [(1, 0.1), (1, 0.0)]
    with pytest.raises(SettingError, match=r"torch\.optim\.SGD has no betas"):
        make_optimizer(model, TrainSettings(optimizer="sgd", betas=(0.5, 0.6)))
    with pytest.raises(SettingError, match=r"optimizer='adamv' is not in torch\.optim\. Did you mean adamw or "):
        make_optimizer(model, TrainSettings(optimizer="adamv"))
    for name, words in (("lbfgs", "several times in a step"), ("SparseAdam", "not sparse"), ("muon", "2D parameters")):
        with pytest.raises(SettingError, match=f"optimizer={name} cannot be used: .*{words}"):
            make_optimizer(model, TrainSettings(optimizer=name))
    with pytest.raises(SettingError, match="Nothing to train"):
        make_optimizer(model.requires_grad_(False), TrainSettings())


def test_a_missing_package_is_asked_for_in_one_line() -> None:
    with pytest.raises(SettingError) as caught:
        require("no_such_package.inside", extra="hf", why="--model here")
    assert str(caught.value) == (
        "--model here needs the package no_such_package. Install it: pip install 'stormtorch[hf]'."
    )


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    chosen = settings(tmp_path, save_every=1, keep=2, steps=6)
    most = 0

    def count(_: int) -> None:
        nonlocal most
        most = max(most, len(list((Path(chosen.output) / "checkpoints").glob("step-*"))))

    assert run(chosen, Quiet(count)) == 0
    assert sorted(path.name for path in checkpoint(chosen, 6).parent.iterdir()) == ["step-00000005", "step-00000006"]
    assert most <= 3
    assert [record["step"] for record in records(chosen, "save")] == [1, 2, 3, 4, 5, 6]


def test_a_disk_that_is_full_during_a_save_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stormtorch.session.api import Session

    real = Session.save
    failing = [4]

    def save(self: Session, directory: Path, **settings: object) -> None:
        if int(Path(directory).name[5:]) in failing:
            raise OSError(28, "No space left on device")  # as a tokenizer's own writing would
        real(self, directory, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "save", save)
    chosen = settings(tmp_path, save_every=2, steps=8)
    watcher = Quiet()
    assert run(chosen, watcher) == 0
    assert len(watcher.warned) == 1
    assert "step-00000004 was not saved" in watcher.warned[0]
    assert "Training goes on. The last good one is" in watcher.warned[0]
    assert "step-00000002" in watcher.warned[0]
    assert losses(chosen).keys() == set(range(1, 9))
    failing.append(12)
    longer = settings(tmp_path, steps=12, schedule="constant", save_every=0, output=str(tmp_path / "other"))
    watcher = Quiet()
    assert run(longer, watcher) == 1
    assert watcher.warned[0].endswith("another disk. There is no checkpoint yet.")
    assert "The last step was not saved. There is no complete checkpoint. Free space" in watcher.warned[-1]


def test_an_evaluation_that_fails_costs_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> float:
        raise torch.OutOfMemoryError("no room for it")

    monkeypatch.setattr(loop, "evaluate", fails)
    chosen = settings(tmp_path, save_every=4, eval_every=4, eval_data=(str(write_text(tmp_path / "held_out.jsonl")),))
    with pytest.raises(torch.OutOfMemoryError):
        run(chosen)
    assert steps_saved(chosen) == [4]
    monkeypatch.undo()
    assert run(chosen) == 0
    assert losses(chosen).keys() == set(range(1, 9))
