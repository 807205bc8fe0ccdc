"""``optimizer=False``: the weights alone, for disks too small for the rest; the optimizer starts again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stormtorch.checkpoint import complete
from stormtorch.checkpoint.files import disk
from stormtorch.checkpoint.files.disk import DiskCalls
from stormtorch.checkpoint.folders.manifest import read_manifest
from stormtorch.core.errors import StorageError, WrongModel
from stormtorch.core.notices import forget_notices

from .made import equal, session_of, small, weights

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "plain sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
}


class Run:
    def __init__(self, maker: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.model = small(seed).to(dtype)
        self.optimizer = MAKERS[maker](self.model)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.session = session_of(self.model, self.optimizer)

    def steps(self, count: int) -> list[float]:
        losses = []
        for number in range(count):
            loss = self.model(torch.arange(8).view(1, 8) + number % 8).float().logsumexp(-1).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    def save(self, path: Path, **how: Any) -> None:
        settings = {"wait": True, "optimizer": False, "files": None, **how}
        self.session._saver.save(path, also={"scheduler": self.scheduler, "note": 7}, **settings)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("maker", MAKERS)
def test_it_goes_on_as_a_new_optimizer_on_these_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, maker: str, dtype: torch.dtype, wait: bool
) -> None:
    run = Run(maker, dtype)
    run.steps(3)
    run.scheduler.step()
    run.save(tmp_path / "weights", wait=wait)
    saved = weights(run.model)
    run.session.close()
    assert complete(tmp_path / "weights")
    files = {
        str(file.relative_to(tmp_path / "weights")) for file in (tmp_path / "weights").rglob("*") if file.is_file()
    }
    assert files == {"model.safetensors", "storm/state.pt", "storm/manifest.json"}

    fresh = Run(maker, dtype, seed=1)
    fresh.model.load_state_dict(saved)
    for group in fresh.optimizer.param_groups:
        group["lr"] = 5e-3  # where the scheduler had come to
    expected = fresh.steps(3), weights(fresh.model)
    fresh.session.close()

    other = Run(maker, dtype, seed=2)
    other.steps(2)
    forget_notices()
    caplog.clear()
    assert other.session.load(tmp_path / "weights", also={"scheduler": other.scheduler}) == {"note": 7}
    assert equal(weights(other.model), saved)
    assert [record.message for record in caplog.records if "starts again" in record.message] != []
    assert all(not state for state in other.optimizer.state.values())
    assert other.optimizer.param_groups[0]["lr"] == 5e-3
    assert other.session._saver.steps == 3
    assert other.steps(3) == expected[0]
    assert equal(weights(other.model), expected[1])
    other.session.save(tmp_path / "all")  # a whole one again
    assert read_manifest(tmp_path / "all").step == 6
    other.session.close()


def test_any_optimizer_may_begin(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run("adamw", torch.float32)
    run.steps(2)
    run.save(tmp_path / "weights")
    run.session.close()
    other = Run("sgd", torch.float32, seed=1)
    other.steps(1)
    other.optimizer.param_groups[0]["lr"] = 0.25
    forget_notices()
    other.session.load(tmp_path / "weights")
    assert "SGD starts again" in caplog.text
    assert other.optimizer.param_groups[0]["lr"] == 0.25
    other.session.close()
    with session_of(small()) as session:  # and none
        session.load(tmp_path / "weights")


def test_a_session_that_had_none_is_still_refused(tmp_path: Path) -> None:
    with session_of(small()) as session:
        session.save(tmp_path / "inference")
    run = Run("adamw", torch.float32)
    with pytest.raises(WrongModel, match="saved from a session without an optimizer"):
        run.session.load(tmp_path / "inference")
    run.session.close()


def test_a_full_disk_names_this_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("adamw", torch.float32)
    run.steps(1)
    calls = dataclasses.replace(DiskCalls(), free_bytes=lambda _folder: 5000)
    monkeypatch.setattr(disk, "CALLS", calls)
    with pytest.raises(StorageError, match=r"alone need [\d.]+ KiB: save\(\.\.\., optimizer=False\), or storm"):
        run.session.save(tmp_path / "one")
    with pytest.raises(StorageError, match=r"another disk\.$"):
        run.save(tmp_path / "one")

    def full(_fd: int, _view: memoryview, _offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "CALLS", DiskCalls(pwrite=full))
    with pytest.raises(StorageError, match="--no-save-optimizer; the optimizer then starts again") as caught:
        run.session.save(tmp_path / "one")
    assert caught.value.errno == 28
    run.session.close()
