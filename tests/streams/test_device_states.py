"""Adam's states on the device: what could go wrong between being kept, passing through, and being looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch.api import Session
from stormtorch.streams import adam
from stormtorch.streams.settings import Settings, Trial

Action = Callable[[int, nn.Module, torch.optim.Optimizer], None]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(
    trial: Trial | None, before: Action = lambda *_: None, *, mode: str = "forward", steps: int = 6
) -> list[torch.Tensor]:
    """The weights after training, plain if there is no ``trial``; ``before`` runs before each step."""
    model = layers()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim == 2]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    # A unit for each layer; with less there would be one for all, and no room beside it for states to pass through.
    settings = Settings(vram=600_000 if trial is not None and trial.kept else 60_000, device="cpu", step=mode)
    session = Session(model, optimizer, settings, trial=trial) if trial is not None else None
    if session is not None and trial is not None and trial.device_share:
        assert session._parts.adam is not None
        assert all(home.on_device for home in session._parts.adam.homes)
    for number in range(steps):
        before(number, model, optimizer)
        step(model, optimizer, number)
    if session is not None:
        session.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("trial", [Trial(), Trial(kept=99), Trial(device_share=1.0)], ids=["cpu", "kept", "passing"])
def test_states_that_user_code_clears(trial: Trial, mode: str) -> None:
    def clear(number: int, _model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if number == 3:
            optimizer.state.clear()

    assert equal(trained(trial, clear, mode=mode), trained(None, clear))


@pytest.mark.parametrize("call", [0, 1, 5])
@pytest.mark.parametrize("trial", [Trial(kept=99), Trial(device_share=1.0)], ids=["kept", "passing"])
def test_an_error_between_two_calls(trial: Trial, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in the middle of a unit's update: nothing is done twice, nothing is left out."""
    real: Any = vars(adam)["adamw_"]

    def fail_once(number: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        if number != 3:
            return
        calls = iter(range(100))

        def failing(*args: Any) -> None:
            if next(calls) == call:
                raise torch.OutOfMemoryError("say")
            real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(adam, "adamw_", failing)
            with pytest.raises(torch.OutOfMemoryError):
                model(torch.ones(4, 32))

    assert equal(trained(trial, fail_once), trained(None))


def test_what_a_stay_remembers_does_not_grow() -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with Session(model, optimizer, Settings(vram=600_000, device="cpu"), trial=Trial(kept=99)) as session:
        for number in range(50):
            step(model, optimizer, number)
        stays = [residence.stay for residence in session._parts.parameters.residences if residence.stay is not None]
        assert stays
        assert max(len(stay.uses) for stay in stays) <= 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Topheavy(nn.Module):
    """The first unit is several times as large as the others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(symbols)
        for block in self.blocks:
            x = block(x)
        return x


def topheavy(trial: Trial, meddle: Callable[[Session, int], None] = lambda *_: None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Topheavy().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with Session(model, optimizer, Settings(vram="8MiB", device="cpu"), trial=trial) as session:
        for number in range(6):
            meddle(session, number)
            for micro in range(1 + number % 2):
                model(torch.arange(8) + number + micro).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_sets_are_as_large_as_what_passes_through() -> None:
    """Now of one micro-batch, now of two, with the largest unit kept."""
    expected = topheavy(Trial())
    assert equal(topheavy(Trial(kept=1, device_share=1.0)), expected)
    assert equal(topheavy(Trial(device_share=1.0)), expected)


def test_a_unit_that_is_kept_no_longer_may_be_too_large_to_pass() -> None:
    def meddle(session: Session, number: int) -> None:
        assert session._parts.adam is not None
        there = session._parts.adam.there
        if number == 0:
            session._parts.ground.pool.grow(1 << 20)
            there.keep([0], wide=False)
        there.share(
            number % 3 / 2, session._parts.ground.pool.capacity_bytes - there.kept_bytes - session.placement.least_bytes
        )

    assert equal(topheavy(Trial(), meddle), topheavy(Trial()))
