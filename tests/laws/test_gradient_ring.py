"""Law: with step="backward", gradients pass through a ring, which is all the RAM that they take: the same numbers."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stormtorch as storm
from stormtorch.core.sizes import round_up
from stormtorch.core.tags import Tag, Tier
from stormtorch.memory.host.arena import PAGE
from stormtorch.native.worker.jobs import Worker
from stormtorch.native.worker.python_worker import PythonThread
from stormtorch.session.api import Session
from stormtorch.streams.optimizer.adam.stream import AdamStream
from stormtorch.streams.settings import Settings, Trial
from stormtorch.streams.units.sizes import homes_for

from .models import (
    CHAIN,
    OTHERS,
    Case,
    Chain,
    Llama,
    Pair,
    Side,
    adamw,
    cross_entropy,
    frozen,
    gradients,
    jitter,
    one_thread,  # noqa: F401  # a fixture
    same,
    sgd,
    stream,
    tight,
    tokens,
)

CPU = torch.device("cpu")
MANY = Case("many", lambda: Chain(blocks=24), tokens, cross_entropy)  # more units than the ring has room for
CASES = [MANY, *(case for case in OTHERS if case.name in ("tied", "moe", "lora", "conv"))]


def on_the_cpu(model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> Session:
    """A session in which the CPU does all updates, with lanes that are late at random, and poison."""
    given = Settings(vram=tight(model), device="cpu", step="backward", **settings)
    return Session(model, optimizer, given, trial=Trial(delay=jitter(CPU, 0), poison=True, device_share=0.0))


@pytest.fixture(autouse=True)
def ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """These machines have RAM for all gradients."""
    always = functools.partial(homes_for, always_ring=True)
    monkeypatch.setattr("stormtorch.session.resources.homes_for", always)


class Late(PythonThread):
    """A worker that begins each update later than its gradients arrive."""

    def _run_one(self) -> bool:
        if self.jobs:
            time.sleep(1e-2)
        return super()._run_one()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stormtorch.session.build.open_worker", lambda: Worker(Late(threads=1)))


def check_ram(session: Session, *, homes: int = 0) -> None:
    """At most the ring was taken for gradients, and ``homes`` bytes beside it."""
    ring, ledger = session._parts.ground.homes.ring_bytes, session.ledger
    whole = sum(unit.grad_bytes for unit in session.units)
    assert 0 < ring <= whole
    peak = next(b.peak_bytes for b in ledger.balances() if (b.tier, b.tag) == (Tier.HOST, Tag.GRADIENTS))
    assert peak == round_up(ring, PAGE) + homes
    ledger.check()


def train(side: Side, steps: int, start: int = 0) -> list[Any]:
    return [frozen(side.step(number)) for number in range(start, start + steps)]


@contextlib.contextmanager
def pair_of(case: Case, **settings: Any) -> Iterator[tuple[Side, Side, Session]]:
    sides = []
    for _ in range(2):
        model = case.build()
        sides.append(Side(model, adamw(model), case, CPU))
    with on_the_cpu(sides[1].model, sides[1].optimizer, **settings) as session:
        sides[1].session = session
        yield sides[0], sides[1], session


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_numbers(case: Case) -> None:
    with pair_of(case) as (plain, streamed, session):
        same(train(streamed, 4), train(plain, 4), "losses")
        same(streamed.model.state_dict(), plain.model.state_dict(), "weights")
        same(frozen(streamed.optimizer.state_dict()), frozen(plain.optimizer.state_dict()), "states")
        check_ram(session)


@pytest.mark.parametrize("case", [MANY, *(case for case in OTHERS if case.name == "moe")], ids=lambda case: case.name)
@pytest.mark.usefixtures("late")
def test_a_late_worker_holds_backward_up_and_nothing_is_overwritten(case: Case) -> None:
    with pair_of(case) as (plain, streamed, session):
        same(train(streamed, 4), train(plain, 4), "losses")
        same(streamed.model.state_dict(), plain.model.state_dict(), "weights")
        check_ram(session)
        if case is MANY:
            assert session.report().waits_s_per_step["buckets"] > 0


@pytest.mark.parametrize("optimizer", [sgd, lambda model: torch.optim.Adagrad(model.parameters(), foreach=False)])
def test_torchs_own_step_takes_gradients_from_the_ring_too(optimizer: Any) -> None:
    with Pair(MANY, optimizer, step="backward") as pair:
        pair.steps(3)
        pair.check(grads=False)
        check_ram(pair.session)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_with_updates_on_the_device(share: float) -> None:
    model, plain = MANY.build(), MANY.build()
    sides = [Side(m, adamw(m), MANY, CPU) for m in (plain, model)]
    trial = Trial(delay=jitter(CPU, 1), poison=True, device_share=share)
    given = Settings(vram=tight(model), device="cpu", step="backward")
    with Session(model, sides[1].optimizer, given, trial=trial) as session:
        same(train(sides[1], 4), train(sides[0], 4), "losses")
        same(model.state_dict(), plain.state_dict(), "weights")
        check_ram(session)


def test_shapes_and_orders_that_change() -> None:
    with pair_of(MANY) as (plain, streamed, session):
        for number in range(5):
            order = torch.randperm(24, generator=torch.Generator().manual_seed(number))[: 9 + 3 * number].tolist()
            for side in (plain, streamed):
                x, y = (part[: 1 + number % 4] for part in tokens(number))
                torch.nn.functional.cross_entropy(side.model(x, order).flatten(0, 1), y.flatten()).backward()
                side.optimizer.step()
                side.optimizer.zero_grad()
        same(streamed.model.state_dict(), plain.model.state_dict(), "weights")
        check_ram(session)


def test_a_parameter_takes_less_than_12_7_bytes() -> None:
    """With bf16 weights and fp32 masters: all of it is in the ledger."""
    torch.manual_seed(0)
    model = Llama(blocks=40, width=96).to(torch.bfloat16)
    count = sum(parameter.numel() for parameter in model.parameters())
    taken = {}
    for step in ("forward", "backward"):
        optimizer = adamw(model)
        with storm.stream(model, optimizer, vram=tight(model), device="cpu", step=step) as session:
            for number in range(2):
                cross_entropy(lambda x: model(x).float(), tokens(number)).backward()  # type: ignore[arg-type]
                optimizer.step()
                optimizer.zero_grad()
            taken[step] = session.ledger.peak_bytes(Tier.HOST) / count
    assert taken["forward"] > 14
    assert taken["backward"] < 12.3, taken


def test_the_plan_names_the_ring_and_says_why() -> None:
    with pair_of(MANY) as (_, streamed, session):
        train(streamed, 1)
        plan = session.plan
        assert plan.gradients is not None
        assert plan.gradients.ring_bytes == session._parts.ground.homes.ring_bytes
        assert "RAM has no room for all of them, and step='backward'" in plan.gradients.reason
        assert all(unit.gradients is not None and unit.gradients.bytes == 0 for unit in plan.units)
        assert "through a ring of " in str(plan)
    with Pair(CHAIN) as pair:
        plan = pair.session.plan
        assert plan.gradients is None
        assert all(unit.gradients is not None and unit.gradients.bytes for unit in plan.units)


# ------------------------------------------------------------------------------------------- gradients that remain


def test_gradients_that_remain_have_a_home_of_their_unit() -> None:
    """Those of a hooked parameter come by torch's own slot, and are used by step()."""

    def hook(side: Side) -> None:
        side.named("blocks.3.up.weight").register_hook(lambda grad: grad * 2)

    with pair_of(MANY) as (plain, streamed, session):
        hook(plain)
        hook(streamed)
        same(train(streamed, 3), train(plain, 3), "losses")
        same(streamed.model.state_dict(), plain.model.state_dict(), "weights")
        unit = next(unit for unit in session.units if any("blocks.3.up.weight" in place.name for place in unit.places))
        check_ram(session, homes=round_up(unit.grad_bytes, PAGE))
        plan = session.plan
        assert [u.name for u in plan.units if u.gradients is not None and u.gradients.bytes] == [unit.name]


def test_gradients_of_parameters_in_no_optimizer_remain_and_add_up_as_before() -> None:
    """Their unit is not updated in backward; user code reads them after it."""
    sides = []
    for _ in range(2):
        model = MANY.build()
        left = model.get_parameter("blocks.5.up.weight")
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p is not left], lr=1e-2, fused=True)
        sides.append(Side(model, optimizer, MANY, CPU))
    plain, streamed = sides
    with on_the_cpu(streamed.model, streamed.optimizer) as session:
        for number in range(3):
            read = []
            for side in (streamed, plain):
                side.loss(number).backward()
                read.append(frozen(side.named("blocks.5.up.weight").grad))
                side.optimizer.step()
                side.optimizer.zero_grad()
                side.named("blocks.5.up.weight").grad = None
            same(read[0], read[1], "the gradient that remains")
        same(streamed.model.state_dict(), plain.model.state_dict(), "weights")
        unit = next(unit for unit in session.units if any("blocks.5.up.weight" in place.name for place in unit.places))
        check_ram(session, homes=round_up(unit.grad_bytes, PAGE))


def test_a_home_for_which_ram_has_no_room_is_refused_in_words() -> None:
    """Nothing is planned for what need not be; the error names it, and training without it goes on."""
    model = MANY.build()
    with on_the_cpu(model, adamw(model)) as session:
        needed = session.ledger.used_bytes(Tier.HOST)
    model = MANY.build()
    optimizer = adamw(model)
    with on_the_cpu(model, optimizer, ram=needed) as session:
        assert session.ledger.free_bytes(Tier.HOST) < PAGE
        parameter = model.get_parameter("blocks.3.up.weight")
        with pytest.raises(storm.OutOfBudget, match=r"Cannot keep the gradients of .* in RAM .*These remain"):
            parameter.grad = torch.ones_like(parameter)
        assert parameter.grad is None
        hook = parameter.register_hook(lambda grad: grad * 2)
        cross_entropy(model, tokens(0)).backward()
        hook.remove()
        for _ in range(2):
            with pytest.raises(storm.OutOfBudget, match="their parameters have hooks"):
                optimizer.step()
        with pytest.raises(storm.StormError, match="half-done"):
            optimizer.zero_grad()
        optimizer.zero_grad()
        cross_entropy(model, tokens(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        check_ram(session)


def test_reentrant_checkpoints() -> None:
    class Reentrant(Chain):
        def forward(self, tokens: torch.Tensor, order: Any = None) -> torch.Tensor:  # noqa: ARG002
            x = self.embed(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return torch.as_tensor(self.head(x))

    case = Case("reentrant", lambda: Reentrant(blocks=20), tokens, cross_entropy)
    with pair_of(case) as (plain, streamed, session):
        same(train(streamed, 3), train(plain, 3), "losses")
        same(streamed.model.state_dict(), plain.model.state_dict(), "weights")
        check_ram(session)


def test_a_second_backward_before_the_step_is_refused() -> None:
    with pair_of(CHAIN) as (_, streamed, session):
        streamed.loss(0).backward()
        with pytest.raises(storm.StormError, match="there is more to add"):
            streamed.loss(1).backward()
        streamed.optimizer.step()
        check_ram(session)


# ------------------------------------------------------------------------------------------------------- cut short


class Broken(Exception):
    pass


def test_an_update_that_fails_leaves_its_gradients_readable_and_the_ring_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = AdamStream.update, []

    def fail(self: AdamStream, *given: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise Broken
        real(self, *given)

    monkeypatch.setattr(AdamStream, "update", fail)
    with pair_of(MANY) as (plain, streamed, session):
        plain.loss(0).backward()
        with pytest.raises(Broken):
            streamed.loss(0).backward()
        here = {name: grad for name, grad in gradients(streamed.model).items() if grad is not None}
        assert here, "the unit whose update failed has its gradients"
        there = gradients(plain.model)
        same(here, {name: there[name] for name in here}, "gradients of the unit that was not updated")
        streamed.optimizer.zero_grad()
        plain.optimizer.zero_grad()
        same(train(streamed, 3), train(plain, 3), "losses")
        same(streamed.model.state_dict(), plain.model.state_dict(), "weights")
        for home in session._parts.schedule.gradients.homes:
            assert home.passing is None


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.usefixtures("late")
def test_a_backward_that_is_cut_short_while_the_ring_is_full(error: type[BaseException]) -> None:
    model = MANY.build()
    optimizer = adamw(model)

    def broken(_grad: torch.Tensor) -> None:
        raise error

    with on_the_cpu(model, optimizer) as session:
        for number in range(2):
            x = model.get_submodule("embed")(tokens(number)[0])
            for index, block in enumerate(model.get_submodule("blocks").children()):
                x = block(x)
                if index == 10:
                    x.register_hook(broken)
            with pytest.raises(error):
                x.square().sum().backward()
            with contextlib.suppress(storm.StormError):
                optimizer.zero_grad()
            optimizer.zero_grad()
        assert all(home.passing is None for home in session._parts.schedule.gradients.homes)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        cross_entropy(model, tokens(5)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        check_ram(session)


def test_spent_gradients_have_a_form_and_no_values() -> None:
    """As before there was a ring: what is there can be counted, and not read."""
    with pair_of(MANY) as (_, streamed, _session):
        streamed.loss(0).backward()
        for parameter in streamed.model.parameters():
            grad = parameter.grad
            assert grad is not None
            assert (grad.shape, grad.dtype, grad.stride()) == (parameter.shape, parameter.dtype, parameter.stride())
            with pytest.raises(storm.StormError, match="is gone"):
                grad.sum()
            with pytest.raises(storm.StormError, match="is gone"):
                grad.zero_()
        streamed.optimizer.step()
        streamed.optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in streamed.model.parameters())


def test_opened_in_less_ram_than_all_gradients_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not fit before, with the least that the refusal names; and without a ring where there is room."""
    monkeypatch.setattr("stormtorch.session.resources.homes_for", homes_for)
    model = MANY.build(torch.bfloat16)
    optimizer = adamw(model)
    with pytest.raises(storm.OutOfBudget) as refused:
        stream(model, optimizer, step="backward", ram="64KiB")
    least = int(refused.value.numbers.split(" are needed, ")[1].split(" bytes")[0])
    with pytest.raises(storm.OutOfBudget):
        stream(model, optimizer, step="forward", ram=least)
    with stream(model, optimizer, step="backward", ram=least) as session:
        cross_entropy(lambda x: model(x).float(), tokens(0)).backward()  # type: ignore[arg-type]
        optimizer.step()
        assert session.ledger.peak_bytes(Tier.HOST) <= least
    with stream(model, optimizer, step="backward") as session:
        assert session.plan.gradients is None
