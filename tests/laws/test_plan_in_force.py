"""``session.plan`` is what the session really does, at any time: as the ledger, the streams and the model see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import stormtorch as storm
from stormtorch.core.plan import Choice, Origin, Plan
from stormtorch.core.tags import Tag, Tier
from stormtorch.memory.host.arena import PAGE
from stormtorch.session.api import Session
from stormtorch.streams.settings import Settings, Trial
from stormtorch.streams.units import placement

from .counting import Counting
from .models import one_thread  # noqa: F401  # a fixture

WIDTH, BLOCKS, ROWS = 32, 6, 64
FORCED, PLANNED, MEASURED = Origin.FORCED, Origin.PLANNED, Origin.MEASURED
TIGHT, ROOMY = 195_000, 8_000_000  # less than the weights alone; more than everything
RUNS = Counter[int]()  # of blocks; STORM restores an attribute that a block changes
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer] | None] = {
    "adam": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "none": None,
}


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        RUNS[self.number] += 1
        return x + torch.as_tensor(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(number) for number in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(x))


class Run:
    """A session on a device that counts, and steps in it. After each, the plan is compared with what is."""

    def __init__(self, optimizer: str, *, meter: Counting | None = None, trial: Trial | None = None, **settings: Any):
        self.model, make = Net(), OPTIMIZERS[optimizer]
        self.optimizer = None if make is None else make(self.model.parameters(), lr=1e-2)
        self.model.requires_grad_(self.optimizer is not None)
        given = Settings(device="cpu", **settings)
        trial = replace(trial or Trial(), meter=meter, small_bytes=1024)
        self.session = Session(self.model, self.optimizer, given, trial=trial)
        check(self.session)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()

    @property
    def plan(self) -> Plan:
        return self.session.plan

    def step(self, passes: int = 1) -> None:
        x = torch.randn(ROWS, WIDTH)
        for _ in range(passes if self.optimizer is not None else 0):
            self.model(x).square().mean().backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            with torch.no_grad():
                self.model(x)
        check(self.session)


def check(session: Session) -> None:
    """Compare the plan with what is. Asks the ledger and the states themselves, not the code that composes the plan."""
    plan, parts, ledger = session.plan, session._parts, session.ledger
    assert plan == session.plan
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.vram.limit_bytes == ledger.budgets[Tier.DEVICE].limit_bytes
    assert plan.ram.limit_bytes == ledger.budgets[Tier.HOST].limit_bytes
    assert plan.pool.pool_bytes == ledger.used_bytes(Tier.DEVICE, Tag.PARAMETERS)
    homes = [] if parts.adam is None else parts.adam.homes
    kept = {home.unit.index for home in homes if home.kept is not None}
    assert {number for number, unit in enumerate(plan.units) if unit.states and unit.states.resident} == kept
    assert {number for number, unit in enumerate(plan.units) if unit.gradients and unit.gradients.resident} == kept
    assert (plan.pool.kept_bytes > 0) == bool(kept)
    if plan.optimizer is not None:
        assert (plan.optimizer.device_share > 0) == any(home.on_device for home in homes if home.kept is None)
        assert (plan.pool.passing_bytes > 0) == (plan.optimizer.device_share > 0)
    for tag, sizes in {
        Tag.PARAMETERS: [unit.weights.bytes for unit in plan.units],
        Tag.GRADIENTS: [unit.gradients.bytes for unit in plan.units if unit.gradients],
        Tag.OPTIMIZER: [unit.states.bytes for unit in plan.units if unit.states],
    }.items():
        if tag is Tag.GRADIENTS and plan.gradients is not None:
            sizes.append(plan.gradients.ring_bytes)
        assert sum(sizes) <= ledger.used_bytes(Tier.HOST, tag) < sum(sizes) + PAGE * (1 + len(sizes)), tag
    resident = {number for number, unit in enumerate(plan.units) if unit.weights.resident}
    if parts.schedule.witness is not None and resident:
        assert resident == parts.parameters.residency.kept or len(resident) == len(plan.units)
    if (saving := parts.schedule.saving) is not None and saving.plan is not None:
        assert [(block.kind, block.inputs_away) for block in plan.activations.blocks] == [
            (block.kind, block.inputs_away) for block in saving.plan.blocks
        ]


@pytest.fixture(autouse=True)
def _small_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left alone of a budget has a least size that is more than all of ours."""
    monkeypatch.setattr(placement, "headroom", lambda limit: limit // 50)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("vram", [TIGHT, ROOMY, "auto"])
def test_of_a_session_that_was_just_opened(optimizer: str, vram: object) -> None:
    with Run(optimizer, vram=vram) as run:
        plan = run.plan
        assert plan.vram.origin is (PLANNED if vram == "auto" else FORCED)
        assert f"vram={vram!r}" in plan.vram.reason
        assert "'auto'" in plan.ram.reason
        choices: list[Choice | None] = [plan.ram, plan.pool, plan.division, plan.step, plan.optimizer, plan.activations]
        assert all(choice.origin is PLANNED and choice.reason for choice in choices if choice is not None)
        assert (plan.step is None) == (plan.optimizer is None) == (optimizer == "none")
        if plan.step is not None and plan.optimizer is not None:
            assert plan.step.mode == "forward"
            assert ("SGD's own step" in plan.optimizer.reason) == (optimizer == "sgd")
        assert (plan.activations.mode, plan.activations.outside) == ("keep", "keep")
        assert all((unit.gradients is not None) == (optimizer != "none") for unit in plan.units)
        assert all((unit.states is not None) == (optimizer == "adam") for unit in plan.units)
        assert [unit.name for unit in plan.units] == [unit.name for unit in run.session.units]
        all_fit = vram != TIGHT
        assert plan.pool.is_whole == all_fit
        assert {unit.weights.resident for unit in plan.units} == {all_fit}
        assert (plan.pool.reason == "all of it fits") == all_fit


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("step", ["forward", "backward", "serial"])
@pytest.mark.parametrize("activations", ["recompute", "offload", "keep"])
def test_what_the_user_has_set_is_forced(optimizer: str, step: str, activations: str) -> None:
    with Run(optimizer, vram=TIGHT, step=step, activations=activations) as run:
        for _ in range(4):
            run.step()
        plan = run.plan
        assert plan.step is not None
        assert (plan.step.mode, plan.step.origin, plan.step.reason) == (step, FORCED, f"step={step!r}")
        assert (plan.activations.mode, plan.activations.origin) == (activations, FORCED)
        assert plan.activations.outside == ("offload" if activations == "offload" else "keep")
        blocks = plan.activations.blocks
        assert [block.kind for block in blocks] == ["recompute"] * (BLOCKS if activations == "recompute" else 0)
        assert all(block.device_bytes == ROWS * WIDTH * 4 and not block.host_bytes for block in blocks)
        assert ("inputs of 6 of 6 blocks stay" in plan.activations.reason) == (activations == "recompute")


@pytest.mark.parametrize(("vram", "kind"), [(480_000, "recompute"), (ROOMY, "keep")])
def test_blocks_run_as_planned(vram: int, kind: str) -> None:
    """Those that the plan recomputes run twice in a pass, the others once."""
    seen = set()
    with Counting() as meter, Run("adam", meter=meter, vram=vram) as run:
        assert run.plan.activations.reason == "not measured yet"
        assert run.plan.activations.origin is PLANNED
        for _ in range(14):
            RUNS.clear()
            run.step()
            chosen = run.plan.activations
            if chosen.blocks:
                assert chosen.origin is MEASURED
                assert [RUNS[number] for number in range(BLOCKS)] == [
                    2 if block.kind == "recompute" else 1 for block in chosen.blocks
                ]
                seen |= {block.kind for block in chosen.blocks}
    assert kind in seen


def test_a_pool_that_grows_and_states_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """First weights get the room that activations leave, then states; the rest is updated on both sides."""
    monkeypatch.setattr("stormtorch.planner.online.device_share", lambda *_, **__: (0.5, "50% on the device: because"))
    plans = []
    with Counting() as meter, Run("adam", meter=meter, vram=1_300_000, activations="keep") as run:
        assert "until activations have been measured" in run.plan.pool.reason
        first = run.plan
        assert first.optimizer is not None
        assert first.optimizer.reason == "on the CPU until rates have been measured"
        for _ in range(8):
            run.step()
            plans.append(run.plan)
    last = plans[-1]
    assert first.pool.pool_bytes < last.pool.pool_bytes
    assert last.pool.origin is MEASURED
    assert last.optimizer is not None
    assert MEASURED in {plan.optimizer.origin for plan in plans if plan.optimizer is not None}
    kept = sum(unit.states is not None and unit.states.resident for unit in last.units)
    assert 0 < kept < len(last.units)
    assert last.optimizer.reason.startswith(f"{kept} of {len(last.units)} units kept on the device; of the rest ")
    assert last.optimizer.reason.endswith("50% on the device: because")


def test_growing_where_not_all_has_room() -> None:
    with Counting() as meter, Run("sgd", meter=meter, vram=500_000, activations="keep") as run:
        for _ in range(6):
            run.step()
        plan = run.plan
        assert not plan.pool.is_whole
        assert plan.pool.origin is MEASURED
        assert "what activations and other programs leave; the whole needs" in plan.pool.reason


def test_a_pool_that_was_enlarged() -> None:
    with Counting() as meter, Run("none", meter=meter, vram=2_000_000, activations="keep") as run:
        planned, parts = run.plan.pool, run.session._parts
        lane = parts.ground.lanes.compute
        piece = parts.parameters.residency.room(planned.pool_bytes, lane, Tag.GRADIENTS)
        run.step()
        assert run.plan.pool.pool_bytes > planned.pool_bytes
        assert "enlarged" in run.plan.pool.reason
        parts.parameters.residency.give(piece, lane.record())


@pytest.mark.parametrize("counts", [True, False])
def test_units_that_stay_without_an_optimizer(counts: bool) -> None:
    with Counting() as meter, Run("none", meter=meter if counts else None, vram=160_000, activations="keep") as run:
        initial = run.plan
        assert not any(unit.weights.resident for unit in initial.units)
        for _ in range(8):
            run.step()
        residences, plan = run.session._parts.parameters.residences, run.plan
        resident = [number for number, unit in enumerate(plan.units) if unit.weights.resident]
        assert 0 < len(resident) < len(plan.units)
        assert all(residences[index].is_current() for index in resident)
        assert plan.pool.origin is MEASURED
        assert plan.pool.reason.startswith(f"{len(resident)} of {len(plan.units)} units are resident, ")
        run.model.requires_grad_(True)
        run.model(torch.randn(ROWS, WIDTH))  # gradients may follow: the initial pool
        assert run.plan.pool == initial.pool
        assert not any(unit.weights.resident for unit in run.plan.units)


def test_fp32_sums_of_micro_batches_lie_at_home_too() -> None:
    with Run("adam", vram=TIGHT) as run:
        run.model.requires_grad_(True)
        sizes = [unit.gradients.bytes for unit in run.plan.units if unit.gradients]
        run.step(passes=3)
        assert [unit.gradients.bytes for unit in run.plan.units if unit.gradients] == sizes, "fp32 needs no wider sums"
    model = Net().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    with storm.stream(model, optimizer, device="cpu", vram=TIGHT) as session:
        for _ in range(2):
            model(torch.randn(ROWS, WIDTH).bfloat16()).float().square().mean().backward()
        check(session)
        units = session.plan.units
        assert all(unit.gradients is not None and unit.gradients.bytes > 2 * unit.weights.bytes for unit in units)


def test_modules_that_are_left_on_the_device() -> None:
    with Run("adam", vram=TIGHT, leave=["head"]) as run:
        assert run.plan.division.left_bytes == sum(p.nbytes for p in run.model.head.parameters())
        assert run.plan.division.unit_bytes == TIGHT // 6
        assert not any("head" in unit.name for unit in run.plan.units)


def test_a_share_that_a_test_has_set() -> None:
    with Run("adam", vram=TIGHT, trial=Trial(device_share=1.0, kept=1)) as run:
        run.step()
        share = run.plan.optimizer
        assert share is not None
        assert (share.device_share, share.origin) == (1.0, FORCED)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_the_report_has_its_reasons_from_the_plan(optimizer: str) -> None:
    with Counting() as meter, Run(optimizer, meter=meter, vram=300_000) as run:
        for _ in range(6):
            run.step()
        plan, report = run.plan, run.session.report()
        assert report.plan == plan
        lines = str(report).splitlines()
        assert any(line.endswith(f"on the device: {plan.pool.reason}") for line in lines)
        assert f"activations: {plan.activations.reason}" in lines
        assert (plan.optimizer is not None) == any(line.startswith("optimizer: ") for line in lines)
        run.session.close()
        assert run.session.plan == plan == run.session.report().plan, "a closed session knows its last plan"


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_no_step_composes_it(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Run(optimizer, vram=TIGHT) as run:
        asked = []
        monkeypatch.setattr("stormtorch.session.api.plan_in_force", lambda *_: asked.append(1))
        monkeypatch.setattr(f"{__name__}.check", lambda _session: None)
        for _ in range(3):
            run.step()
        assert not asked
        monkeypatch.undo()
