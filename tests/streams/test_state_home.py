"""Law: training does not know where Adam's states lie. A home that lends copies gives the bits of plain PyTorch."""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from stormtorch.memory.host.arena import HostArena
from stormtorch.session.api import Session
from stormtorch.streams.optimizer.adam.state_home import RamHome
from stormtorch.streams.settings import Settings, Trial
from stormtorch.streams.units.unit import Unit

from .copying_home import CopyingHome

STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + y


@pytest.fixture
def homes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CopyingHome]]:
    """The copying homes of sessions that a test opens, in place of RAM. At the end, nothing is lent any more."""
    made: list[CopyingHome] = []
    chance = random.Random(0)

    def make(units: list[Unit], arena: HostArena) -> CopyingHome:
        made.append(CopyingHome(units, arena, lambda: time.sleep(chance.choice([0] * 9 + [1e-3]))))
        return made[-1]

    count = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr("stormtorch.session.build.RamHome", make)
    yield made
    torch.set_num_threads(count)
    assert made, "the session kept its states in RAM"
    assert all(home.taken_back for home in made)
    assert not any(home.lent for home in made), "states that were not released"


def build(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4))).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, session: Session | None, steps: range) -> None:
    """Accumulates two micro-batches, clips, and reads and writes states now and then."""
    for number in steps:
        for micro in range(2):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * number + micro))
            model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()
        if session is None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        else:
            session.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        if number == 0:
            change_states(model, optimizer)


def change_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As user code may: in place, by another tensor, by clearing, and by writing a weight."""
    first, second, third, *_ = model.parameters()
    view = optimizer.state[first]["exp_avg"]
    view.mul_(0.5)
    view.data = view.clone() * 3.0
    optimizer.state[second]["exp_avg_sq"] = optimizer.state[second]["exp_avg_sq"].clone().mul_(2)
    optimizer.state[third].clear()
    with torch.no_grad():
        second.mul_(0.5)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    entries = [optimizer.state[p] for p in model.parameters()]
    return [torch.clone(entry[name]) for entry in entries for name in ("step", "exp_avg", "exp_avg_sq")]


def result(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [*states(model, optimizer), *(parameter.detach().clone() for parameter in model.parameters())]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in itertools.zip_longest(ours, theirs))


TRIALS = {
    "cpu": Trial(device_share=0.0, poison=True),
    "some": Trial(device_share=0.5, poison=True),
    "passing": Trial(device_share=1.0, poison=True),
    "kept": Trial(kept=2, device_share=0.5, poison=True),
}
MIXED = [pytest.param(t, marks=[] if n == "kept" else pytest.mark.wide, id=n) for n, t in TRIALS.items()]


def give_way(session: Session) -> None:
    """Take the device memory of updates that are queued: the CPU does them, while the caller waits."""
    adam = session._parts.adam
    assert adam is not None
    assert any(home.waiting is not None for home in adam.homes)
    adam.there.give_way()


def open_session(model: nn.Module, optimizer: torch.optim.Optimizer, trial: Trial, step: str = "forward") -> Session:
    vram = 100_000 + (300_000 if trial.kept else 0)
    return Session(model, optimizer, Settings(vram=vram, device="cpu", step=step), trial=trial)


@pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS)
def test_states_that_are_lent_give_the_bits_of_plain_pytorch(trial: Trial, homes: list[CopyingHome]) -> None:
    plain, streamed = build(torch.float32), build(torch.float32)
    train(*plain, None, range(STEPS))
    with open_session(*streamed, trial) as session:
        train(*streamed, session, range(STEPS))
        assert same(result(*streamed), result(*plain))
    assert len(homes) == 1
    assert same(result(*streamed), result(*plain))


def test_updates_that_find_no_room_on_the_device(homes: list[CopyingHome]) -> None:
    plain, streamed = build(torch.float32), build(torch.float32)
    train(*plain, None, range(STEPS))
    with open_session(*streamed, TRIALS["passing"]) as session:
        train(*streamed, session, range(2))
        give_way(session)
        train(*streamed, session, range(2, STEPS))
        assert same(result(*streamed), result(*plain))
    assert len(homes) == 1


@pytest.mark.parametrize(
    ("dtype", "step"), [(torch.bfloat16, "forward"), (torch.float16, "forward"), (torch.bfloat16, "serial")]
)
@pytest.mark.parametrize("trial", MIXED)
def test_masters_that_are_lent(
    dtype: torch.dtype, trial: Trial, step: str, homes: list[CopyingHome], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for in_ram in (False, True):
        model, optimizer = build(dtype)
        with monkeypatch.context() as patch:
            if in_ram:
                patch.setattr("stormtorch.session.build.RamHome", RamHome)
            with open_session(model, optimizer, trial, step) as session:
                train(model, optimizer, session, range(STEPS))
                masters = [torch.clone(optimizer.state[p]["master"]) for p in model.parameters()]
                found.append([*masters, *result(model, optimizer)])
    assert len(homes) == 1
    assert same(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trial", MIXED)
def test_checkpoints_and_state_dicts(
    dtype: torch.dtype, trial: Trial, homes: list[CopyingHome], tmp_path: Path
) -> None:
    model, optimizer = build(dtype)
    with open_session(model, optimizer, trial) as session:
        train(model, optimizer, session, range(2))
        session.save(tmp_path / "two")  # written while training goes on
        train(model, optimizer, session, range(2, STEPS))
        weights, states_dict = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        expected = result(model, optimizer)
        train(model, optimizer, session, range(STEPS, STEPS + 2))
        later = result(model, optimizer)

        session.load(tmp_path / "two")
        train(model, optimizer, session, range(2, STEPS))
        assert same(result(model, optimizer), expected)

        train(model, optimizer, session, range(2))
        model.load_state_dict(weights)
        optimizer.load_state_dict(states_dict)
        assert same(result(model, optimizer), expected)
        train(model, optimizer, session, range(STEPS, STEPS + 2))
        assert same(result(model, optimizer), later)

    fresh, its_optimizer = build(dtype)
    with open_session(fresh, its_optimizer, trial) as session:
        session.load(tmp_path / "two")
        train(fresh, its_optimizer, session, range(2, STEPS))
        assert same(result(fresh, its_optimizer), expected)
    assert len(homes) == 2
