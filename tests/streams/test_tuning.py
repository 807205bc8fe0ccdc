"""What a session tells those who plan: of the link what is left, of VRAM what others would like to have."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional

from stormtorch.core.errors import OutOfBudget, StormError
from stormtorch.core.events import Span, What
from stormtorch.core.plan import OptimizerShare, Origin
from stormtorch.core.tags import Tag
from stormtorch.memory.pools.pool import DevicePool
from stormtorch.observe.recorder import Recorder
from stormtorch.planner.online import Tuning
from stormtorch.session.api import Session
from stormtorch.streams.optimizer.adam.home import AdamHome, Waiting
from stormtorch.streams.optimizer.adam.stream import AdamStream
from stormtorch.streams.optimizer.shares import Rates
from stormtorch.streams.optimizer.updater import NoUpdater
from stormtorch.streams.settings import Settings, Trial
from stormtorch.streams.units.placement import Growth

from ..laws.counting import Counting

RATE = 50e9


def tuning_of(mode: str, waits_s: float, cause: str = "updates", *, steps: int = 4) -> Tuning:
    """A session whose steps have waited for so long each."""
    recorder = Recorder()
    nothing: Any = SimpleNamespace()
    tuning = Tuning(
        None,
        ledger=nothing,
        pool=nothing,
        placement=nothing,
        partition=nothing,
        recorder=recorder,
        mode=mode,
    )
    tuning.take_adam(nothing, nothing, can_travel=lambda: True, fixed_share=None)
    for _ in range(steps):
        recorder(Span(What.COPY, 0.0, 0.01, "store", Tag.GRADIENTS, int(RATE / 100)))
        recorder(Span(What.WAIT, 0.0, waits_s, cause))
        recorder.step()
    return tuning


@pytest.mark.parametrize(
    ("mode", "waits_s", "left"),
    [
        ("forward", 0.0, 1.0),
        ("forward", 0.05, 0.5),
        ("auto", 0.3, 0.0),
        ("backward", 0.3, 1.0),  # nothing is updated behind forward there
    ],
)
@pytest.mark.parametrize("cause", ["updates", "states"])
def test_an_update_that_is_late_leaves_the_link_to_itself(mode: str, waits_s: float, left: float, cause: str) -> None:
    out, _ = tuning_of(mode, waits_s, cause).free_rates(forward_s=0.1)
    assert out == pytest.approx(left * RATE)


def test_only_what_came_since_the_last_plan_counts() -> None:
    """The first steps are slow: the device has no share of the update yet."""
    tuning = tuning_of("forward", 0.3)
    assert tuning.free_rates(forward_s=0.1)[0] == 0
    for _ in range(4):
        tuning._recorder.step()
    assert tuning.free_rates(forward_s=0.1)[0] == pytest.approx(RATE)


@pytest.mark.parametrize(("states_rate", "expected"), [(0.0, 50e9), (30e9, 30e9), (70e9, 50e9)])
def test_states_come_in_as_fast_as_they_did_beside_the_cpu(
    states_rate: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are loaded in backward too, when no update uses RAM: their rate says little about an update."""
    tuning, seen = tuning_of("forward", 0.0), []

    def note(rates: Rates, **_: object) -> tuple[float, str]:
        seen.append(rates.load_bytes_per_s)
        return 0.0, ""

    monkeypatch.setattr("stormtorch.planner.online.device_share", note)
    worker = SimpleNamespace(threads=1, stats=lambda: SimpleNamespace(busy_s=1.0, elements=4e9))
    tuning._worker, tuning._updater = cast(Any, worker), NoUpdater()
    tuning._partition = cast(Any, SimpleNamespace(units=[]))
    tuning.pool = cast(Any, SimpleNamespace(capacity_bytes=0))
    tuning._placement = cast(Any, SimpleNamespace(least_bytes=0, adding_bytes=0))
    for lane, rate in (("load", 50e9), ("aside", states_rate)):
        if rate:
            tuning._recorder(Span(What.COPY, 0.0, 1.0, lane, Tag.OPTIMIZER, int(rate)))
    tuning._choose_share()
    assert seen == [pytest.approx(expected)]
    share = tuning.share
    assert share is not None
    assert share.origin is Origin.MEASURED


def test_a_share_without_rates_is_not_measured() -> None:
    tuning = tuning_of("forward", 0.0)  # nothing was loaded
    worker = SimpleNamespace(threads=1, stats=lambda: SimpleNamespace(busy_s=1.0, elements=4e9))
    tuning._worker, tuning._updater = cast(Any, worker), NoUpdater()
    tuning._partition = cast(Any, SimpleNamespace(units=[]))
    tuning.pool = cast(Any, SimpleNamespace(capacity_bytes=0))
    tuning._placement = cast(Any, SimpleNamespace(least_bytes=0, adding_bytes=0))
    tuning._choose_share()
    assert tuning.share == OptimizerShare(device_share=0.0, reason="not measured yet", origin=Origin.PLANNED)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(functional.gelu(self.up(x)))
        return x + y


@pytest.mark.parametrize("mode", ["auto", "recompute"])
def test_blocks_would_like_to_keep_their_inputs(mode: str) -> None:
    """Before the plan they have left, since their room is not known yet; the pool must not take that room."""
    model = nn.Sequential(*(Block() for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(32, 16)
    settings = Settings(device="cpu", activations=mode, vram=120_000)
    with Session(model, optimizer, settings, trial=Trial(activation_room=0, small_bytes=1)) as session:
        saving = session.saving
        assert saving is not None
        for step in range(4):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            wish = saving.wish_bytes
            assert wish >= 5 * x.nbytes if step < 2 else wish == 0


def trained(
    mode: str,
    micro_batches: tuple[int, ...],
    meter: Counting | None,
    *,
    begin: Callable[[Session], None] = lambda _session: None,
    see: Callable[[Session, int], None] = lambda _session, _number: None,
) -> list[torch.Tensor]:
    """The weights after a step for each of ``micro_batches``, in a pool of the least size. ``see`` looks on after each
    step, where a ``meter`` makes the session one of a device that counts."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = Settings(vram=400_000, device="cpu", step=mode, activations="keep")
    with Session(model, optimizer, settings, trial=Trial(meter=meter, poison=True)) as session:
        if meter is not None:
            begin(session)
        for number, count in enumerate(micro_batches):
            for _ in range(count):
                x = torch.randn(4, 64, generator=torch.Generator().manual_seed(number)).bfloat16()
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if meter is not None:
                see(session, number)
    return [parameter.detach().clone() for parameter in model.parameters()]


def same_weights(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("mode", "micro_batches"),
    [("forward", (1,) * 8), ("forward", (2,) * 8), ("forward", (1,) * 5 + (2,) * 3), ("backward", (1,) * 8)],
    ids=["never", "always", "later", "in_backward"],
)
@pytest.mark.parametrize("budget_is_spent", [True, False])
def test_states_pass_where_nobody_adds_gradients_up(
    mode: str, micro_batches: tuple[int, ...], budget_is_spent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of the least size has no room for states but what is set aside for accumulating, and they give it back."""
    monkeypatch.setattr(
        "stormtorch.planner.online.device_share", lambda *_, **__: (0.5, "50% on the device: said the test")
    )
    monkeypatch.setattr("stormtorch.planner.online.growth", lambda *_, **__: Growth(pool_bytes=0, keep=[]))
    accumulates, passed = [count > 1 for count in micro_batches], []

    def begin(session: Session) -> None:
        if budget_is_spent:  # then states give way in the middle of a backward
            session._parts.parameters.residency._enlarge = lambda _size: False

    def see(session: Session, number: int) -> None:
        assert session._parts.adam is not None
        passed.append(session._parts.adam.there.sets_bytes > 0)
        if number == 7 and any(accumulates):
            share = session.plan.optimizer
            assert share is not None
            assert share.reason.startswith("on the CPU: ")

    with Counting() as meter:
        ours = trained(mode, micro_batches, meter, begin=begin, see=see)
    assert same_weights(ours, trained(mode, micro_batches, None))
    first = 1 if mode == "backward" else 2  # share follows the step there
    assert passed == [number >= first and not any(accumulates[: number + 1]) for number in range(8)]


def test_a_pool_that_cannot_grow_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has taken what was free a moment ago."""
    refused = []

    def grow(_pool: DevicePool, size: int) -> None:
        refused.append(size)
        raise OutOfBudget("Cannot allocate", "the device itself is full", "", "")

    with Counting() as meter:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        settings = Settings(vram=2 << 30, device="cpu", activations="keep")
        monkeypatch.setattr("stormtorch.streams.units.placement.headroom", lambda limit: limit // 50)
        monkeypatch.setattr("stormtorch.planner.online.growth", lambda *_, **__: Growth(pool_bytes=4096, keep=[]))
        with Session(model, optimizer, settings, trial=Trial(meter=meter)) as session:
            monkeypatch.setattr(DevicePool, "grow", grow)
            before = session._parts.tuning.peak.grown_bytes
            for _ in range(6):
                model(torch.randn(4, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert session._parts.tuning.peak.grown_bytes == before
    assert refused == [4096] * 2


@pytest.mark.parametrize("mode", ["forward", "serial"])
def test_a_new_share_leaves_no_update_to_the_host(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device was to update, it updates: the CPU would have to do it at once, with everybody waiting."""
    shares, late = iter([0.5, 0.0, 1.0, 0.25]), []
    update_at_home = AdamStream._update_at_home

    def note(self: AdamStream, home: AdamHome, waiting: Waiting) -> None:
        late.append(home.unit.index)
        update_at_home(self, home, waiting)

    monkeypatch.setattr("stormtorch.planner.online.device_share", lambda *_, **__: (next(shares), "said the test"))
    monkeypatch.setattr("stormtorch.planner.online.growth", lambda *_, **__: Growth(pool_bytes=0, keep=[]))
    monkeypatch.setattr(AdamStream, "_update_at_home", note)
    seen = []
    with Counting() as meter:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        settings = Settings(vram=400_000, device="cpu", step=mode, activations="keep")
        with Session(model, optimizer, settings, trial=Trial(meter=meter, poison=True)) as session:
            for _ in range(10):
                model(torch.randn(4, 64).bfloat16()).square().mean().backward()
                session.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                assert session._parts.adam is not None
                seen.append(session._parts.adam.there.share_now)
    assert not late
    assert seen == [0.0] * 2 + [0.5] + [0.0] * 2 + [1.0] * 3 + [0.25] * 2


class SlowLock:
    """Locks what ``gate`` lets through; if ``refuses``, then only what is small."""

    def __init__(self, *, refuses: bool) -> None:
        self.gate, self.refuses = threading.Event(), refuses

    def lock(self, _address: int, size: int) -> None:
        if threading.current_thread().name.startswith("storm-page-lock") and size > STATES_FROM:
            assert self.gate.wait(300)
            if self.refuses:
                raise StormError("CUDA_ERROR_OUT_OF_MEMORY")

    def unlock(self, _address: int) -> None:
        pass


STATES_FROM = 200_000  # bytes: nothing else in this session is as large


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("refuses", [False, True], ids=["late", "refused"])
def test_states_travel_when_they_are_page_locked(mode: str, refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening does not wait for that. Until then the CPU updates all; where it is refused, for good."""
    monkeypatch.setattr(
        "stormtorch.planner.online.device_share", lambda *_, **__: (0.5, "50% on the device: said the test")
    )
    grown: list[bool] = []

    def growth(*_: object, state_bytes: dict[int, int], **__: object) -> Growth:
        grown.append(bool(state_bytes))
        return Growth(pool_bytes=0, keep=[])

    monkeypatch.setattr("stormtorch.planner.online.growth", growth)
    lock, shares = SlowLock(refuses=refuses), list[float]()

    def see(session: Session, number: int) -> None:
        assert session._parts.adam is not None
        shares.append(session._parts.adam.there.share_now)
        if number == 4:
            lock.gate.set()
            lock_is_over(session)
        if number == 8 and refuses:
            assert session.plan.optimizer is not None
            assert "could not be page-locked" in session.plan.optimizer.reason

    plain = trained(mode, (1,) * 9, None)
    monkeypatch.setattr("stormtorch.session.resources.page_lock_for", lambda _device: lock)
    with Counting() as meter:
        ours = trained(mode, (1,) * 9, meter, see=see)
    assert same_weights(ours, plain)
    first = 5 if mode == "backward" else 6  # the step after the one that finds it out
    assert not any(shares[:first])
    assert all(shares[first:]) != refuses
    assert grown == [not refuses] * 2


@pytest.mark.parametrize("first", [2, 20, 51])
def test_a_late_decision_knows_how_long_a_step_takes(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is followed by others, as if training had begun then."""
    clock, seen, decided = [0.0], list[Rates](), list[int]()
    monkeypatch.setattr("stormtorch.observe.recorder.time.perf_counter", lambda: clock[0])
    tuning = tuning_of("backward", 0.0, steps=0)

    def note(rates: Rates, **_: object) -> tuple[float, str]:
        seen.append(rates)
        decided.append(tuning.steps)
        return 0.0, ""

    monkeypatch.setattr("stormtorch.planner.online.device_share", note)
    tuning._updater = NoUpdater()
    busy = SimpleNamespace(threads=1, stats=lambda: SimpleNamespace(busy_s=0.9 * tuning.steps, elements=4e9))
    tuning._worker = cast(Any, busy)
    tuning._partition = cast(Any, SimpleNamespace(units=[]))
    tuning.pool = cast(Any, SimpleNamespace(capacity_bytes=0))
    tuning._placement = cast(Any, SimpleNamespace(least_bytes=0, adding_bytes=0))
    tuning.meter = cast(Any, object())
    monkeypatch.setattr(tuning, "_grow", lambda *_: None)
    tuning._can_travel = lambda: True if tuning.steps >= first else None
    for _ in range(60):
        clock[0] += 1.0
        tuning.after_step(cast(Any, SimpleNamespace(has_added=False, memory=SimpleNamespace(is_ring=False))), None)
    assert [rates.step_s for rates in seen] == [pytest.approx(1.0)] * len(seen)
    assert [rates.cpu_busy_s for rates in seen] == [pytest.approx(0.9)] * len(seen)
    assert decided[:4] == [first, first + 1, first + 3, first + 6]


@pytest.mark.parametrize("settles", [0, pytest.param(8, marks=pytest.mark.wide)])
def test_the_pool_grows_before_states_get_their_share(settles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the lock is there, also between two steps: a share that finds no room would be none, for long."""
    monkeypatch.setattr(
        "stormtorch.planner.online.device_share", lambda *_, **__: (0.5, "50% on the device: said the test")
    )
    monkeypatch.setattr("stormtorch.streams.units.placement.headroom", lambda _limit: 1024)
    monkeypatch.setattr(f"{__name__}.STATES_FROM", 400_000)
    lock = SlowLock(refuses=False)
    monkeypatch.setattr("stormtorch.session.resources.page_lock_for", lambda _device: lock)
    with Counting() as meter:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(24))).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        settings = Settings(vram=300_000, device="cpu", step="forward", activations="keep")
        with Session(model, optimizer, settings, trial=Trial(meter=meter)) as session:
            assert session._parts.adam is not None
            for number in range(11):
                for _ in range(2):
                    model(torch.randn(4, 64).bfloat16()).square().mean().backward()
                if number == settles:
                    lock.gate.set()
                    lock_is_over(session)
                optimizer.step()
                optimizer.zero_grad()
            assert session._parts.adam.there.share_now == 0.5


def lock_is_over(session: Session) -> None:
    deadline_s = time.monotonic() + 300
    while session._parts.tuning._can_travel() is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_gradients_that_cannot_be_page_locked_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights could, so lanes copy locked memory only. Some systems allow so many bytes of it, and no more."""
    locked: list[int] = []

    class Most:
        def lock(self, _address: int, size: int) -> None:
            if locked and size > 16_384:
                raise StormError("CUDA_ERROR_OUT_OF_MEMORY")
            locked.append(size)

        def unlock(self, _address: int) -> None:
            pass

    monkeypatch.setattr("stormtorch.session.resources.page_lock_for", lambda _device: Most())
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(OutOfBudget, match=r"Cannot page-lock .* for GRADIENTS .*only= or leave="):
        Session(model, optimizer, Settings(vram=1 << 30, device="cpu"))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
