"""Adam's states on the device: what could go wrong between being kept, passing through, and being looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch.core.errors import StormError
from stormtorch.session.api import Session
from stormtorch.streams.optimizer.adam import stream as adam
from stormtorch.streams.settings import Settings, Trial
from stormtorch.streams.weights.stream import ParameterStream

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


@contextlib.contextmanager
def out_of_memory(monkeypatch: pytest.MonkeyPatch, call: int) -> Iterator[None]:
    """The update that is called as number ``call`` inside fails, which ends what is done there."""
    real: Any = vars(adam)["adamw_"]
    calls = iter(range(100))

    def failing(*args: Any) -> None:
        if next(calls) == call:
            raise torch.OutOfMemoryError("say")
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(adam, "adamw_", failing)
        with pytest.raises(torch.OutOfMemoryError):
            yield


@pytest.mark.parametrize("call", [0, 1, 3])
@pytest.mark.parametrize("trial", [Trial(kept=99), Trial(device_share=1.0)], ids=["kept", "passing"])
def test_an_error_between_two_calls(trial: Trial, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in the middle of a unit's update: nothing is done twice, nothing is left out."""

    def fail_once(number: int, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        if number == 3:
            with out_of_memory(monkeypatch, call):
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
        room = session._parts.ground.pool.capacity_bytes - there.kept_bytes - session.plan.pool.least_bytes
        there.share(number % 3 / 2, room, early=number % 2 == 0)

    assert equal(topheavy(Trial(), meddle), topheavy(Trial()))


def test_an_error_in_backward_is_half_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was updated on the device before the error cannot be taken back: STORM tells user code that goes on."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    settings = Settings(vram=60_000, device="cpu", step="backward")
    with Session(model, optimizer, settings, trial=Trial(device_share=1.0, poison=True)):
        step(model, optimizer, 0)
        for call in (0, 1):
            with out_of_memory(monkeypatch, call):
                model(torch.ones(4, 32)).square().mean().backward()
            if call == 0:  # nothing has changed yet
                optimizer.zero_grad()
                continue
            with pytest.raises(StormError, match="updated 1 of 6 units"):
                optimizer.zero_grad()
            optimizer.zero_grad()
        step(model, optimizer, 1)


def test_an_interrupt_while_compute_waits_for_states() -> None:
    """The room that they are in is not lost."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    settings = Settings(vram=60_000, device="cpu")
    with Session(model, optimizer, settings, trial=Trial(device_share=1.0)) as session:
        assert session._parts.adam is not None
        waits = session._parts.adam.there._waits
        step(model, optimizer, 0)
        real = waits.wait

        def interrupted(event: Any, cause: str, unit: int | None = None) -> None:
            if cause == "states":
                raise KeyboardInterrupt
            real(event, cause, unit)

        for _ in range(12):
            waits.wait = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                model(torch.ones(4, 32))
            waits.wait = real  # type: ignore[method-assign]
        step(model, optimizer, 1)


class Skipping(nn.Module):
    """Its third block may be left out; a parameter of each has no elements; one block is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        for block in self.blocks:
            block.register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
        self.blocks[5].requires_grad_(False)
        self.left_out: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks: list[Any] = list(self.blocks)
        for number, block in enumerate(blocks):
            if number != self.left_out:
                x = block(x) + block.nothing.sum()
        return x


def skipping(shares: dict[int, float] | None, mode: str = "backward") -> list[torch.Tensor]:
    """Trained plainly, or with the device's share changed after some steps."""
    model = Skipping()
    full = [parameter for parameter in model.parameters() if parameter.numel()]
    empty = [parameter for parameter in model.parameters() if not parameter.numel()]
    groups: list[dict[str, Any]] = [{"params": full}, {"params": empty, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    session = None
    if shares is not None:
        settings = Settings(vram=90_000, device="cpu", step=mode)
        session = Session(model, optimizer, settings, trial=Trial(device_share=shares.get(-1, 1.0), poison=True))
    for number in range(12):
        model.left_out = 2 if number == 3 else None
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if session is not None and shares is not None and number in shares:
            assert session._parts.adam is not None
            there, pool = session._parts.adam.there, session._parts.ground.pool
            room = pool.capacity_bytes - there.kept_bytes - session.plan.pool.least_bytes
            there.share(shares[number], room, early=mode != "backward")
            assert there.sets_bytes == 0 or shares[number]
    if session is not None:
        session.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("mode", ["forward", "backward", "serial"])
@pytest.mark.parametrize("shares", [{-1: 0.0}, {}, {3: 0.0, 6: 1.0}, {3: 0.5, 6: 1.0}], ids=str)
def test_what_was_loaded_ahead_of_another_share(shares: dict[int, float], mode: str) -> None:
    """Backward loads states ahead of a block that forward had left out; then the CPU changes them at home."""
    assert equal(skipping(shares, mode), skipping(None))


def test_units_without_trained_parameters_are_loaded_ahead_like_others() -> None:
    model = layers()
    for index in (1, 4):
        model[index].requires_grad_(False)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), fused=True)
    settings = Settings(vram=60_000, device="cpu", step="backward")
    with Session(model, optimizer, settings, trial=Trial(device_share=1.0)) as session:
        adam_stream = session._parts.adam
        assert adam_stream is not None
        for home in adam_stream.homes:
            assert home.unit.trained or adam_stream.there.stage(home)


def test_states_are_loaded_before_the_step_is_asked_for() -> None:
    """As far as there is room: forward begins with a unit whose states are there."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with Session(model, optimizer, Settings(vram=60_000, device="cpu"), trial=Trial(device_share=0.5)) as session:
        adam = session._parts.adam
        assert adam is not None
        assert [home.on_device for home in adam.homes] == [True, False] * 3
        for number in range(3):
            model(torch.ones(4, 32)).square().mean().backward()
            first = adam.homes[0]
            assert number == 0 or first.staged
            assert all(len(staged.parts) == 3 for staged in first.staged), "gradients that user code has not asked for"
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("what", ["state", "weights", "gradients", "rate"])
def test_changes_between_backward_and_step_are_seen(what: str) -> None:
    """Although the states have been loaded by then."""

    def run(trial: Trial | None) -> list[torch.Tensor]:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        settings = Settings(vram=60_000, device="cpu")
        session = Session(model, optimizer, settings, trial=trial) if trial is not None else None
        held = None
        for number in range(4):
            model(torch.full((4, 32), 1.0 + number)).square().mean().backward()
            if number:
                weight: Any = model[0].weight
                if what == "state":
                    held = optimizer.state[weight]["exp_avg"] if held is None else held
                    held.mul_(0.5)
                elif what == "weights":
                    weight.data.mul_(1.5)
                elif what == "gradients":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                else:
                    optimizer.param_groups[0]["lr"] *= 2
            optimizer.step()
            optimizer.zero_grad()
        if session is not None:
            session.close()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert equal(run(Trial(device_share=0.5, poison=True)), run(None))


def test_states_give_way_in_the_middle_of_backward() -> None:
    """The weights that an update needs find no room beside the states that it needs: the CPU does it."""

    def run(trial: Trial | None) -> list[torch.Tensor]:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        settings = Settings(vram=60_000, device="cpu", step="backward")
        session = Session(model, optimizer, settings, trial=trial) if trial is not None else None
        if session is not None:
            _fill_the_pool_at_an_update(session)
        for number in range(4):
            step(model, optimizer, number)
        if session is not None:
            adam = session._parts.adam
            assert adam is not None
            assert adam.there.gave_way
            assert adam.there.sets_bytes == 0
            session.close()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert equal(run(Trial(device_share=1.0, poison=True)), run(None))


def _fill_the_pool_at_an_update(session: Session) -> None:
    """At the ninth update on the device, its unit has left the pool, and other pieces take all that is free of it."""
    adam, parts, taken = session._parts.adam, session._parts, []
    assert adam is not None
    parameters, pool, lanes, update = parts.parameters, parts.ground.pool, parts.ground.lanes, adam.update_here
    calls = 0

    def update_here(*args: Any) -> bool:
        nonlocal calls
        calls += 1
        if calls != 9:
            return update(*args)
        for residence in parameters.residences:
            if residence.stay is not None and not residence.installed:
                parameters.residency.drop(residence)
        while (piece := pool.take(1024, lanes.compute)) is not None:
            taken.append(piece)
        parameters.residency._enlarge = lambda _size: False
        done = update(*args)
        for piece in taken:
            parameters.residency.give(piece)
        return done

    adam.update_here = update_here  # type: ignore[assignment,method-assign]


@pytest.mark.parametrize("call", [1, 3])
def test_an_interrupt_while_the_cpu_does_what_had_no_room(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """States gave way after the step was asked for; what was updated before the interrupt is not updated again."""

    def run(trial: Trial | None) -> list[torch.Tensor]:
        model = layers()
        weights, biases = ([p for p in model.parameters() if p.ndim == dim] for dim in (2, 1))
        groups: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
        session = Session(model, optimizer, Settings(vram=60_000, device="cpu"), trial=trial) if trial else None
        for number in range(4):
            if session is not None and number == 2:
                adam = session._parts.adam
                assert adam is not None
                adam.there.give_way()
                with out_of_memory(monkeypatch, call):
                    model(torch.ones(4, 32))
            step(model, optimizer, number)
        if session is not None:
            session.close()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert equal(run(Trial(device_share=1.0, poison=True)), run(None))


def test_an_error_in_the_first_backward_counts_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_once(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if number == 0:
            with out_of_memory(monkeypatch, 0):
                model(torch.ones(4, 32)).square().mean().backward()
            optimizer.zero_grad()

    trial = Trial(device_share=1.0, poison=True)
    assert equal(trained(trial, fail_once, mode="backward", steps=3), trained(None, steps=3))


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("look", [False, True], ids=["closed", "looked_at"])
def test_an_update_without_room_for_the_weights_is_done_at_home(
    kept: int, look: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """User code keeps a graph, and it keeps the device's memory. The step that it asked for is still made."""
    expected = trained(None)
    model = layers()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim == 2]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    settings = Settings(vram=600_000 if kept else 60_000, device="cpu", step="forward")
    with Session(model, optimizer, settings, trial=Trial(device_share=1.0, kept=kept)) as session:
        for number in range(5):
            step(model, optimizer, number)
            if look and number == 2:
                with monkeypatch.context() as full:
                    session._parts.schedule.residency.drop_all()
                    full.setattr(ParameterStream, "load", lambda *_: None)
                    before = [parameter.detach().clone() for parameter in model.parameters()]
                assert all(parameter.isfinite().all() for parameter in before)
        step(model, optimizer, 5)
        assert session._parts.adam is not None
        if kept or not look:  # or states that pass have given way for good
            assert any(home.waiting is not None for home in session._parts.adam.homes)
        session._parts.schedule.residency.drop_all()
        monkeypatch.setattr(ParameterStream, "load", lambda *_: None)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected, strict=True))


def test_states_that_were_loaded_ahead_are_not_those_after_an_update_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps in a row, and at the second no room for the weights, when the states are on the device already."""

    def run(*, streamed: bool) -> list[torch.Tensor]:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        with contextlib.ExitStack() as stack:
            if streamed:
                settings, trial = Settings(vram=600_000, device="cpu", step="forward"), Trial(device_share=1.0, kept=2)
                session = stack.enter_context(Session(model, optimizer, settings, trial=trial))
            for number in range(6):
                x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
                model(x).square().mean().backward()
                optimizer.step()
                if number == 2:
                    with monkeypatch.context() as full:
                        if streamed:
                            assert session._parts.adam is not None
                            session._parts.schedule.load_ahead()
                            assert any(home.waiting and home.staged for home in session._parts.adam.homes)
                            session._parts.schedule.residency.drop_all()
                            full.setattr(ParameterStream, "load", lambda *_: None)
                        optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(torch.equal(*pair) for pair in zip(run(streamed=True), run(streamed=False), strict=True))


def test_early_states_are_those_of_units_that_are_used() -> None:
    """A unit that was left out last time, or comes late in forward, does not hold the room of the others."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with Session(model, optimizer, Settings(vram=60_000, device="cpu"), trial=Trial(device_share=1.0)) as session:
        adam = session._parts.adam
        assert adam is not None
        for _ in range(4):
            x = torch.ones(4, 32)
            for index in (5, 4, 3):
                x = model[index](x)
            x.square().mean().backward()
            staged = [home.unit.index for home in adam.homes if home.staged]
            optimizer.step()
            optimizer.zero_grad()
        assert staged
        assert staged[-1] == 5
        assert 0 not in staged
