"""When units get memory for updates ahead of the step, how much, and when they lose it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch.core.errors import OutOfBudget
from stormtorch.core.events import Span, What
from stormtorch.observe.recorder import Recorder
from stormtorch.planner.ahead import Sparing
from stormtorch.session.api import Session
from stormtorch.streams.settings import Settings, Trial

from ..laws.counting import Counting

GIB = 1 << 30


class Told:
    """An updater that notes what it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ahead_units, self.taken_over, self.calls, self.error = 0, 0, list[tuple[Any, ...]](), error

    def spare(self, elements: float, most_bytes: int) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append(("spare", elements, most_bytes))
        self.ahead_units = 3

    def pause_ahead(self, steps: int) -> None:
        self.calls.append(("pause", steps))

    def stop_ahead(self) -> None:
        self.calls.append(("stop",))
        self.ahead_units = 0


def run(
    monkeypatch: pytest.MonkeyPatch,
    updater: Told,
    *,
    steps: int = 60,
    waits_s: float = 0.1,
    with_s: float = 0.9,
    without_s: float = 1.0,
    before_s: float = 1.0,
    clips: Callable[[int], bool] = lambda _: False,
) -> list[tuple[Any, ...]]:
    """Steps of a session, which take ``with_s`` where backward begins updates, and ``before_s`` before there are any;
    the CPU updates 2e9 in a second. Steps that clip drop updates."""
    recorder, worker = Recorder(), SimpleNamespace(threads=4)
    worker.stats = lambda: SimpleNamespace(elements=8 * 10**9, busy_s=16.0)
    ledger: Any = SimpleNamespace(free_bytes=lambda _tier: 20 * GIB)
    given: tuple[Any, Any, Any] = (updater, worker, ledger)
    sparing, now_s, paused = Sparing(*given, recorder), 0.0, 0
    monkeypatch.setattr("stormtorch.observe.recorder.time.perf_counter", lambda: now_s)
    for number in range(1, steps + 1):
        now_s += before_s if not updater.ahead_units else without_s if paused else with_s
        updater.taken_over += 0 if paused or clips(number) else updater.ahead_units
        paused = max(0, paused - 1)
        recorder(Span(What.WAIT, 0.0, waits_s, "updates"))
        recorder.step()
        before = len(updater.calls)
        sparing.after_step(number)
        paused = next((call[1] for call in updater.calls[before:] if call[0] == "pause"), paused)
    return updater.calls


def test_as_much_as_the_cpu_can_do_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, *others) = run(monkeypatch, Told())
    assert first == ("spare", pytest.approx(2e9 * 2 / 3 / 2), 10 * GIB)
    assert [call[0] for call in others] == ["pause"]  # to compare; they stay


def test_none_where_nobody_waits_for_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, Told(), waits_s=0.01) == []


@pytest.mark.parametrize("with_s", [1.0, 1.1])
def test_they_end_where_steps_are_no_faster(monkeypatch: pytest.MonkeyPatch, with_s: float) -> None:
    assert [call[0] for call in run(monkeypatch, Told(), with_s=with_s)] == ["spare", "pause", "stop"]


def test_the_steps_that_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of one kind: a gain of little more than what is asked for is found."""
    assert [call[0] for call in run(monkeypatch, Told(), with_s=0.985)] == ["spare", "pause"]


def test_they_must_be_faster_than_before_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step that begins none, the CPU has updates that the device shared before."""
    assert [call[0] for call in run(monkeypatch, Told(), before_s=0.9, without_s=1.2)] == ["spare", "pause", "stop"]


def test_they_end_where_steps_begin_to_clip_and_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = run(monkeypatch, Told(), steps=1300, clips=lambda number: 200 < number < 700)
    # Tried after 530 steps, once more while steps clip, and after 1530.
    assert [call[0] for call in calls] == ["spare", "pause", "stop", "spare", "pause", "stop"]
    assert [call[0] for call in run(monkeypatch, Told(), steps=1300, clips=lambda n: n % 2 > 0)] == ["spare", "pause"]


def test_it_is_tried_again_where_nobody_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [call[0] for call in run(monkeypatch, Told(), steps=600, before_s=20.0, with_s=1.0)] == []
    assert [call[0] for call in run(monkeypatch, Told(), steps=600, with_s=1.0)] == ["spare", "pause", "stop"] * 2


def test_other_programs_have_the_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, Told(OutOfBudget("no", "room", "at", "all"))) == []


@pytest.mark.parametrize(
    ("step", "decides"), [("auto", True), ("forward", True), ("backward", False), ("serial", False)]
)
def test_the_sessions_that_decide(step: str, decides: bool) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with Counting() as meter:
        settings = Settings(vram=1 << 20, device="cpu", step=step)
        with Session(model, optimizer, settings, trial=Trial(meter=meter)) as session:
            assert (session._parts.tuning._sparing is not None) == decides


@pytest.mark.parametrize("gain", [0.0, 100.0], ids=["ends", "goes_on"])
def test_a_whole_run(gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first step to the verdict, with the numbers of plain PyTorch."""
    changes = {"_AT": 5, "_LEAST_WAIT": -1.0, "_RECENT": 4, "_WITH": range(10, 13), "_WITHOUT": range(14, 17)}
    for name, value in (changes | {"_GAIN": gain}).items():
        monkeypatch.setattr(f"stormtorch.planner.ahead.{name}", value)
    monkeypatch.setattr("stormtorch.streams.optimizer.adam.ahead._LATE", 10**6)
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True) for each in (plain, model)]
    with Counting() as meter:
        settings = Settings(vram=1 << 20, ram="1GiB", device="cpu")
        with Session(model, optimizers[1], settings, trial=Trial(meter=meter)) as session:
            adam = session._parts.adam
            assert adam is not None
            units = []
            for number in range(20):
                x = torch.randn(4, 64, generator=torch.Generator().manual_seed(number))
                losses = []
                for each, optimizer in zip((plain, model), optimizers, strict=True):
                    losses.append(each(x).square().mean())
                    losses[-1].backward()
                    nn.utils.clip_grad_norm_(each.parameters(), 1e6)
                    optimizer.step()
                    optimizer.zero_grad()
                assert torch.equal(*losses)
                units.append(adam.ahead_units)
            assert units[3] == 0
            assert units[8] > 0
            assert session._parts.tuning._sparing is not None
            assert session._parts.tuning._sparing.is_over
            assert bool(units[-1]) == (gain > 1)
            assert adam.ahead.taken_over > 0
            assert ("updated in backward" in str(session.plan.optimizer)) == (gain > 1)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)
