"""Law: whatever a model and its optimizer hold comes back as it was, and nothing is copied that need not be."""

from __future__ import annotations

import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import stormtorch as storm
from stormtorch.checkpoint.files import disk
from stormtorch.checkpoint.state.snapshot import Piece, Still
from stormtorch.core.budget import Budget
from stormtorch.core.tags import Tag, Tier
from stormtorch.memory.books.ledger import Ledger

from .models import (
    CHAIN,
    frozen,
    one_thread,  # noqa: F401  # a fixture
    same,
    stream,
)
from .test_checkpoint_background import Brake, brake, files_of  # noqa: F401  # a fixture
from .test_checkpoint_resume import LORA, Run


class Odd(nn.Module):
    """Tensors of every kind that a model may have."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.across = nn.Parameter(torch.randn(8, 4).t())  # not contiguous
        self.gap = nn.Parameter(torch.randn(4, 16)[:, ::2])  # nor dense
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.wave = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.codes = nn.Parameter(torch.randint(0, 100, (5,), dtype=torch.int8), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.free = nn.Parameter(torch.randn(3))  # of no group
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("words", torch.arange(3).to(torch.uint16))
        self.register_buffer("mirrored", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("minus", torch.randn(3, dtype=torch.complex64).conj().imag)
        self.register_buffer("passing", torch.randn(3), persistent=False)
        self.register_buffer("nothing", None)
        self.again = self.body  # tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x) * self.scale
        x = self.again(x) @ self.across.t() @ self.gap
        wave = torch.view_as_real(self.wave).sum()
        return (x.sum() + wave + self.free.sum()).square()


def _odd(seed: int) -> tuple[Odd, optim.Optimizer]:
    torch.manual_seed(seed)
    model = Odd()
    mine = [p for name, p in model.named_parameters() if p.requires_grad and name != "free"]
    return model, optim.AdamW(mine, lr=1e-2, foreach=False)


def _train(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> list[torch.Tensor]:
    losses = []
    for number in range(steps):
        loss = model(torch.full((2, 8), 0.1 * (number + 1)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


@pytest.mark.parametrize("wait", [True, False])
def test_tensors_of_every_kind(tmp_path: Path, wait: bool) -> None:
    model, optimizer = _odd(0)
    with stream(model, optimizer) as session:
        _train(model, optimizer, 2)
        optimizer.add_param_group({"params": [model.free], "lr": 3e-3})
        _train(model, optimizer, 1)
        session.save(tmp_path / "one", wait=wait)
        before = frozen(dict(model.state_dict()))
        expected = _train(model, optimizer, 2)
        after = frozen(dict(model.state_dict()))
    other, optimizer = _odd(1)
    optimizer.add_param_group({"params": [other.free], "lr": 1.0})
    with stream(other, optimizer) as session:
        session.load(tmp_path / "one")
        same(frozen(dict(other.state_dict())), before, "weights")
        same(_train(other, optimizer, 2), expected, "losses")
        same(frozen(dict(other.state_dict())), after, "weights later")
        assert other.get_buffer("mirrored").is_conj()
        assert optimizer.param_groups[1]["lr"] == 3e-3


def test_before_the_first_step_of_a_run_that_updates_in_backward(tmp_path: Path) -> None:
    """The update has happened: its moments are of the checkpoint, although step() has not shown them yet."""
    run = Run(CHAIN, "adamw", step="backward", dtype=torch.bfloat16)
    run.case.loss(run.model, run.case.batch(0)).backward()
    run.session.save(tmp_path / "one")
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.session.save(tmp_path / "two")
    run.session.close()
    name = "storm/optimizer.safetensors"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


# ------------------------------------------------------------------------------------------------------- what is copied


def test_what_is_frozen_is_not_copied_for_a_step(tmp_path: Path, brake: Brake) -> None:  # noqa: F811
    run = Run(LORA, "adamw")
    run.losses(0, 2)
    brake.go.set()
    run.save(tmp_path / "waited")
    brake.go.clear()
    run.save(tmp_path / "behind", wait=False)
    run.losses(2, 3)
    trained = sum(p.nbytes for p in run.model.parameters() if p.requires_grad)
    assert 0 < run.session.ledger.used_bytes(Tier.HOST, Tag.CHECKPOINT) <= 3 * trained
    held = next(name for name, p in run.model.named_parameters() if not p.requires_grad)
    with torch.no_grad():
        run.model.get_parameter(held).mul_(2.0)  # and for a write of the user it is
    brake.go.set()
    run.session.synchronize()
    assert files_of(tmp_path / "behind") == files_of(tmp_path / "waited")
    run.session.close()


def test_thousands_of_tensors_do_not_hold_up_a_step() -> None:
    ledger = Ledger(Budget(tier=Tier.HOST, limit_bytes=1 << 30, given="ram"))
    still = Still(ledger)
    still.hold([Piece(torch.zeros(4), number // 50) for number in range(10_000)])
    began = time.perf_counter()
    still.before_change(None)
    assert time.perf_counter() - began < 20.0  # 40 where each was an entry of the ledger
    assert still.copied_bytes == 160_000
    still.release()
    assert ledger.used_bytes(Tier.HOST) == 0


def test_two_threads_that_change_one_thing_make_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the copy of the first, which must not be overwritten by a later look at the memory."""
    from stormtorch.checkpoint.state import snapshot as module

    still = Still(Ledger(Budget(tier=Tier.HOST, limit_bytes=1 << 20, given="ram")))
    memory = torch.zeros(4)
    piece = Piece(memory, 0)
    still.hold([piece])
    inside, go, copies = threading.Event(), threading.Event(), []
    really = module._copy

    def slow(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(1)
        inside.set()
        assert go.wait(300)
        return really(tensor)

    monkeypatch.setattr(module, "_copy", slow)
    done: list[Any] = []

    def change() -> None:
        still.before_change(0)
        done.append(1)

    threads = [threading.Thread(target=change) for _ in range(2)]
    threads[0].start()
    assert inside.wait(300)
    threads[1].start()
    time.sleep(0.1)
    assert done == []
    go.set()
    for thread in threads:
        thread.join()
    memory.fill_(9.0)
    with still.lend(piece) as found:
        assert found.tolist() == [0.0] * 4
    assert len(copies) == 1


def test_giving_up_frees_those_who_wait(tmp_path: Path, brake: Brake) -> None:  # noqa: F811
    run = Run(CHAIN, "adamw")
    run.losses(0, 1)
    run.save(tmp_path / "one", wait=False)
    writing = run.session._saver._writing
    assert writing is not None
    threading.Timer(0.2, brake.go.set).start()
    writing.give_up()
    assert list(tmp_path.iterdir()) == []
    run.losses(1, 2)
    run.save(tmp_path / "two")
    assert disk.CALLS is not None
    run.session.close()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fused", "capturable"])
def test_step_counts_lie_where_the_kernels_of_what_is_not_streamed_read_them(tmp_path: Path, kind: str) -> None:
    """A checkpoint is read into RAM; torch's fused kernel would follow an address there."""

    def losses(optimizer: optim.Optimizer, model: nn.Module, first: int) -> list[float]:
        found = []
        for number in (first, first + 1):
            loss = CHAIN.loss(model, tuple(part.cuda() for part in CHAIN.batch(number)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    def begin() -> tuple[nn.Module, optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = CHAIN.build()
        left = list(model.get_submodule("blocks.3").parameters())
        others = [p for p in model.parameters() if all(p is not q for q in left)]  # in RAM torch refuses capturable
        groups: list[dict[str, Any]] = [{"params": others}, {"params": left, kind: True}]
        optimizer = optim.AdamW(groups, lr=1e-2)
        return model, optimizer, stream(model, optimizer, device="cuda", leave=["blocks.3"])

    model, optimizer, session = begin()
    losses(optimizer, model, 0)
    session.save(tmp_path / "one")
    expected = losses(optimizer, model, 2)
    session.close()
    model, optimizer, session = begin()
    session.load(tmp_path / "one")
    step = optimizer.state[model.get_parameter("blocks.3.up.weight")]["step"]
    assert step.device.type == "cuda"
    assert losses(optimizer, model, 2) == expected
    session.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_parameters_whose_state_user_code_has_cleared(tmp_path: Path, dtype: torch.dtype) -> None:
    """Clearing resets the moments, as after a restart of the schedule; the fp32 weights go on."""

    def opened(seed: int) -> tuple[nn.Module, optim.Optimizer, storm.Session]:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).to(dtype)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, storm.stream(model, optimizer, vram="1MiB", device="cpu")

    def train(model: nn.Module, optimizer: optim.Optimizer) -> None:
        for number in range(3):
            model(torch.full((2, 8), 0.1 * (number + 1), dtype=dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer, session = opened(0)
    with session:
        train(model, optimizer)
        optimizer.state.clear()
        session.save(tmp_path / "saved")
        train(model, optimizer)
        expected = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    model, optimizer, session = opened(1)
    with session:
        session.load(tmp_path / "saved")
        train(model, optimizer)
        same((optimizer.state_dict(), model.state_dict()), expected, "after loading")
