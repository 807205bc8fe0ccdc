"""Law: a save in the background is the save of that moment, and training does not notice, however slow the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch.checkpoint import complete
from stormtorch.checkpoint.files import disk
from stormtorch.core.budget import Budget
from stormtorch.core.errors import StorageError
from stormtorch.core.tags import Tag, Tier
from stormtorch.memory.books.ledger import Ledger

from .models import (
    CHAIN,
    OTHERS,
    frozen,
    one_thread,  # noqa: F401  # a fixture
    same,
)
from .test_checkpoint_resume import Run

CONV = next(case for case in OTHERS if case.name == "conv")


class Brake:
    """A disk that writes tensors only when it is let, after the first ``free`` writes."""

    def __init__(self, free: int = 0) -> None:
        self.go, self._free, self._lock = threading.Event(), free, threading.Lock()
        self.writes = 0

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        with self._lock:
            self.writes += 1
            held = self.writes > self._free
        if held:
            assert self.go.wait(300)
        return disk.DiskCalls().pwrite(fd, view, offset)


@pytest.fixture
def brake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Brake]:
    made = Brake(free=1)
    monkeypatch.setattr(disk, "CALLS", disk.DiskCalls(pwrite=made.write))
    yield made
    made.go.set()


def files_of(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != "manifest.json"
    }


WAYS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": torch.bfloat16},
    "kept": {"kept": 99},
    "backward": {"step": "backward", "dtype": torch.bfloat16},
    "serial": {"step": "serial"},
    "delays": {"seed": 1},
    "left": {"leave": ["blocks.3"]},
}


COMBINATIONS = [*(("adamw", way) for way in WAYS), ("sgd-momentum", "bf16"), ("sgd-momentum", "left")]


@pytest.mark.parametrize(("maker", "way"), [*COMBINATIONS, ("lbfgs", "serial")])
@pytest.mark.daily("backward", "delays", "sgd-momentum-bf16", "lbfgs")
def test_the_file_is_of_the_moment_of_save(tmp_path: Path, brake: Brake, maker: str, way: str) -> None:
    """Nothing is written until three more steps were taken; RAM has room for the copies."""
    of_the_moment(tmp_path, brake, maker, way, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("maker", "way"), COMBINATIONS)
def test_on_a_gpu(tmp_path: Path, brake: Brake, maker: str, way: str) -> None:
    of_the_moment(tmp_path, brake, maker, way, "cuda")


def of_the_moment(tmp_path: Path, brake: Brake, maker: str, way: str, device: str) -> None:
    run = Run(CHAIN, maker, device=device, **WAYS[way])
    run.losses(0, 3)
    brake.go.set()
    run.save(tmp_path / "waited")
    brake.go.clear()
    run.save(tmp_path / "behind", wait=False)
    assert not (tmp_path / "behind").exists()
    losses = run.losses(3, 6)
    assert run.session.ledger.used_bytes(Tier.HOST, Tag.CHECKPOINT) > 0
    assert not (tmp_path / "behind").exists()
    brake.go.set()
    run.session.synchronize()
    assert complete(tmp_path / "behind")
    assert files_of(tmp_path / "behind") == files_of(tmp_path / "waited")
    assert run.session.ledger.used_bytes(Tier.HOST, Tag.CHECKPOINT) == 0
    run.session.close()
    undisturbed = Run(CHAIN, maker, device=device, **WAYS[way])
    undisturbed.losses(0, 3)
    same([one[2:] for one in losses], [one[2:] for one in undisturbed.losses(3, 6)], "losses")
    undisturbed.session.close()


def test_where_ram_has_no_room_the_step_waits(tmp_path: Path, brake: Brake) -> None:
    run = Run(CHAIN, "adamw", dtype=torch.bfloat16)
    run.losses(0, 2)
    brake.go.set()
    run.save(tmp_path / "waited")
    brake.go.clear()
    run.save(tmp_path / "behind", wait=False)
    ledger = run.session.ledger
    _fill_up(ledger)
    begun = threading.Event()

    def let_go() -> None:
        assert begun.wait(300)
        time.sleep(0.3)
        brake.go.set()

    thread = threading.Thread(target=let_go)
    thread.start()
    run.optimizer.zero_grad()
    run.case.loss(run.model, run.case.batch(2)).backward()  # forward and backward run all the same
    begun.set()
    started = time.perf_counter()
    run.optimizer.step()
    assert time.perf_counter() - started > 0.2
    thread.join()
    ledger.check()
    run.session.synchronize()
    assert files_of(tmp_path / "behind") == files_of(tmp_path / "waited")
    run.session.close()


def _fill_up(ledger: Ledger) -> None:
    """Let the budget for RAM be what is used, as it is for a model that fills the machine."""
    used = ledger.used_bytes(Tier.HOST)
    ledger.budgets[Tier.HOST] = Budget(tier=Tier.HOST, limit_bytes=used, given="ram='little'")
    ledger._tier_peak[Tier.HOST] = used


def _edit(model: nn.Module) -> None:
    model.get_parameter("blocks.6.up.weight").data.mul_(0.5)


def _assign(model: nn.Module) -> None:
    model.get_parameter("blocks.1.up.weight").data = torch.ones(64, 32)


def _load_state(model: nn.Module) -> None:
    torch.manual_seed(9)
    model.load_state_dict(CHAIN.build().state_dict())


@pytest.mark.parametrize("write", [_edit, _assign, _load_state], ids=lambda write: write.__name__)
def test_a_write_of_the_user_comes_too_late_for_the_file(
    tmp_path: Path, brake: Brake, write: Callable[[nn.Module], None]
) -> None:
    run = Run(CHAIN, "adamw")
    run.losses(0, 2)
    brake.go.set()
    run.save(tmp_path / "waited")
    brake.go.clear()
    run.save(tmp_path / "behind", wait=False)
    write(run.model)
    after = frozen(run.model.state_dict())
    run.optimizer.state[run.model.get_parameter("blocks.2.up.weight")]["exp_avg"].zero_()
    brake.go.set()
    run.session.synchronize()
    assert files_of(tmp_path / "behind") == files_of(tmp_path / "waited")
    same(frozen(run.model.state_dict()), after, "weights")
    run.session.close()


def test_a_state_dict_that_is_loaded_comes_too_late(tmp_path: Path, brake: Brake) -> None:
    run = Run(CHAIN, "adamw")
    run.losses(0, 1)
    early = frozen(run.optimizer.state_dict())
    run.losses(1, 3)
    brake.go.set()
    run.save(tmp_path / "waited")
    brake.go.clear()
    run.save(tmp_path / "behind", wait=False)
    run.optimizer.load_state_dict(early)
    brake.go.set()
    run.session.synchronize()
    assert files_of(tmp_path / "behind") == files_of(tmp_path / "waited")
    run.session.close()


def test_buffers_that_forward_changes(tmp_path: Path, brake: Brake) -> None:
    run = Run(CONV, "sgd-momentum")
    run.losses(0, 2)
    brake.go.set()
    run.save(tmp_path / "waited")
    brake.go.clear()
    run.save(tmp_path / "behind", wait=False)
    with torch.no_grad():
        run.case.loss(run.model, run.case.batch(5))
    brake.go.set()
    run.session.close()  # waits for it
    assert files_of(tmp_path / "behind") == files_of(tmp_path / "waited")


def test_the_next_save_and_load_wait_for_the_last(tmp_path: Path, brake: Brake) -> None:
    run = Run(CHAIN, "adamw")
    run.losses(0, 2)
    run.save(tmp_path / "one", wait=False)
    threading.Timer(0.3, brake.go.set).start()
    run.save(tmp_path / "two", wait=False)
    assert complete(tmp_path / "one")
    run.load(tmp_path / "one")
    assert complete(tmp_path / "two")
    run.session.close()


@pytest.mark.parametrize("tell", ["save", "synchronize", "close", "load"])
def test_what_went_wrong_is_said_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tell: str
) -> None:
    run = Run(CHAIN, "adamw")
    run.losses(0, 1)
    run.save(tmp_path / "good")

    def full(_fd: int, _view: memoryview, _offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "CALLS", disk.DiskCalls(pwrite=full))
    run.save(tmp_path / "bad", wait=False)
    run.losses(1, 3)
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: run.save(tmp_path / "other"),
        "synchronize": run.session.synchronize,
        "close": run.session.close,
        "load": lambda: run.load(tmp_path / "good"),
    }
    with pytest.raises(StorageError, match="no space is left") as caught:
        calls[tell]()
    assert caught.value.errno == 28
    monkeypatch.setattr(disk, "CALLS", disk.DiskCalls())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good"]
    if tell != "close":
        run.losses(3, 4)
        run.save(tmp_path / "later")
        assert complete(tmp_path / "later")
        run.session.close()
    assert type(run.model.get_parameter("embed.weight")) is nn.Parameter


def test_copies_are_made_only_of_what_is_not_written_yet(tmp_path: Path) -> None:
    run = Run(CHAIN, "adamw")
    run.losses(0, 2)
    run.save(tmp_path / "one", wait=False)
    deadline = time.monotonic() + 300
    while not (tmp_path / "one").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    run.losses(2, 3)
    run.session.synchronize()
    assert Tag.CHECKPOINT not in [line.tag for line in run.session.ledger.balances()]
    run.session.close()
