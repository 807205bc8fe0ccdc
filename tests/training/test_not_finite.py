"""A loss that is no number: the run stops in time, says the step, and saves nothing that it touched; or skips it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stormtorch.training.model import own_model
from stormtorch.training.run.loop import NotFinite
from stormtorch.training.settings.train_settings import TrainSettings

from .tiny import OwnModel, Quiet, checkpoint, losses, one_thread, records, run, settings, steps_saved, write_model  # noqa: F401

pytest.importorskip("transformers")


class Poisoned(OwnModel):
    """The loss of call number ``at`` is NaN, or only its gradient is."""

    def __init__(self, at: int, *, gradient_only: bool = False) -> None:
        super().__init__()
        self.calls, self.at, self.gradient_only = 0, at, gradient_only

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(input_ids, labels)
        self.calls += self.training
        if self.calls == self.at and self.training:
            loss = found["loss"]
            found["loss"] = loss + (loss - loss.detach()).abs().sqrt() if self.gradient_only else loss * math.nan
        return found


def poisoned(monkeypatch: pytest.MonkeyPatch, at: int, *, gradient_only: bool = False) -> None:
    monkeypatch.setattr(own_model, "find_callable", lambda *_, **__: lambda: Poisoned(at, gradient_only=gradient_only))


def own_settings(folder: Path, **changes: Any) -> TrainSettings:
    tokenizer = str(write_model(folder / "model") / "tokenizer.json")
    return settings(folder, model="some_module:make", tokenizer=tokenizer, dtype="auto", **changes)


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("gradient_only", [False, True])
@pytest.mark.parametrize("log_every", [1, 100])
def test_it_stops_and_saves_nothing_poisoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: float, gradient_only: bool, log_every: int
) -> None:
    poisoned(monkeypatch, 4, gradient_only=gradient_only)
    chosen = own_settings(tmp_path, clip=clip, save_every=1, keep=9, log_every=log_every)
    with pytest.raises(NotFinite) as caught:
        run(chosen)
    assert "tep 4" in str(caught.value)
    assert steps_saved(chosen) == [1, 2, 3]
    weights = load_file(checkpoint(chosen, 3) / "model.safetensors")
    assert all(bool(weight.isfinite().all()) for weight in weights.values())


def test_the_message_names_step_and_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned(monkeypatch, 4)
    chosen = own_settings(tmp_path, save_every=2)
    with pytest.raises(NotFinite, match=r"Step 4: the loss is nan\. The last good checkpoint is .*step-00000002"):
        run(chosen)
    assert [record["step"] for record in records(chosen, "nan")] == [4]
    assert losses(chosen).keys() == {1, 2, 3}


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("gradient_only", [False, True])
def test_skipping_leaves_out_that_update_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: float, gradient_only: bool
) -> None:
    poisoned(monkeypatch, 4, gradient_only=gradient_only)
    chosen = own_settings(tmp_path, clip=clip, on_nan="skip", save_every=1, keep=9)
    watcher = Quiet()
    assert run(chosen, watcher) == 0
    assert len(watcher.warned) == 1
    assert watcher.warned[0].startswith("Skipped step 4: ")
    assert [record["step"] for record in records(chosen, "skip")] == [4]
    assert losses(chosen).keys() == {1, 2, 3, 5, 6, 7, 8}
    before, after = (load_file(checkpoint(chosen, step) / "model.safetensors") for step in (3, 4))
    assert all(torch.equal(before[name], after[name]) for name in before)
    last = load_file(checkpoint(chosen, 8) / "model.safetensors")
    assert not torch.equal(before["head.weight"], last["head.weight"])
    assert all(bool(weight.isfinite().all()) for weight in last.values())


def test_skipping_for_ever_is_not_training(tmp_path: Path) -> None:
    """An update may itself make weights that nothing good comes of."""
    chosen = settings(tmp_path, steps=40, lr=1e30, warmup=0, on_nan="skip", save_every=5)
    watcher = Quiet()
    with pytest.raises(NotFinite, match="for the 10th time in a row"):
        run(chosen, watcher)
    assert len(watcher.warned) == 10
    for step in steps_saved(chosen):
        weights = load_file(checkpoint(chosen, step) / "model.safetensors")
        assert all(bool(weight.isfinite().all()) for weight in weights.values())
