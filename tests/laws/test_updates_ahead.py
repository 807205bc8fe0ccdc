"""Law: updates that backward begins ahead of the step, into spare memory, give the numbers of plain PyTorch, whatever
happens before the step."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch.streams.optimizer.adam import ahead
from stormtorch.streams.optimizer.adam.ahead import Ahead

from .models import CHAIN, LLAMA, OTHERS, Case, Pair, Side, cross_entropy, frozen, one_thread, same  # noqa: F401  # a fixture
from .models import tokens as tokens_of

DROPPING = next(case for case in OTHERS if case.name == "dropout")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units keep updates ahead however slow the machine is, and try again soon after a step that has clipped."""
    monkeypatch.setattr(ahead, "_LATE", 10**6)
    monkeypatch.setattr(ahead, "_REST", 2)


def ahead_of(pair: Pair) -> Ahead:
    adam = pair.session._parts.adam
    assert adam is not None
    return adam.ahead


def shapes(step: int) -> Any:
    """Batches of changing lengths."""
    given, target = tokens_of(step)
    length = given.shape[1] - step % 3
    return given[:, :length], target[:, :length]


def clipped_step(step: int, limit: float) -> Callable[[Side], tuple[torch.Tensor, torch.Tensor]]:
    def loss_and_norm(side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(step)
        loss = side.loss(step)
        loss.backward()
        total = nn.utils.clip_grad_norm_(side.model.parameters(), limit)
        side.optimizer.step()
        side.optimizer.zero_grad()
        return loss.detach(), total

    return loss_and_norm


@pytest.mark.parametrize("case", [DROPPING, pytest.param(LLAMA, marks=pytest.mark.wide)], ids=lambda case: case.name)
def test_clipping_that_comes_and_goes(case: Case, device: torch.device) -> None:
    """In two hundred steps, some clip and some do not; batches change their shape."""
    case = Case(case.name, case.make, shapes, cross_entropy)
    with Pair(case, device=device, ahead=True) as pair:
        norms, clipped, limit = list[float](), 0, 1e9
        for number in range(200):
            if number % 10 == 9 and device.type == "cpu":  # a GPU adds norms up in another order
                limit = statistics.median(norms[-10:]) * 1.05
            norms.append(float(pair.both(clipped_step(number, limit))[1]))
            clipped += norms[-1] > limit
        pair.check()
        seen = ahead_of(pair)
        assert seen.taken_over > 100
        if device.type == "cpu":
            assert 20 < clipped < 180
            assert seen.begun > seen.taken_over


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters(dtype: torch.dtype, device: torch.device) -> None:
    case = Case("chain", lambda: CHAIN.make().to(dtype), CHAIN.batch, CHAIN.loss)
    with Pair(case, device=device, ahead=True) as first, Pair(case, device=device) as second:
        left = []
        for pair in (first, second):
            for number in range(6):
                pair.streamed.step(number)
            left.append(frozen((pair.streamed.model.state_dict(), pair.streamed.optimizer.state_dict())))
        same(left[0], left[1], "the same without updates ahead")
        assert ahead_of(first).taken_over


def _read_weights(side: Side) -> Any:
    return [p.detach().norm() for p in side.model.parameters()]


def _write_a_weight(side: Side) -> None:
    with torch.no_grad():
        next(side.model.parameters()).mul_(0.5)


def _write_through_data(side: Side) -> None:
    list(side.model.parameters())[-1].data.add_(0.125)


def _scale_a_gradient(side: Side) -> None:
    list(side.model.parameters())[2].grad.mul_(0.5)  # type: ignore[union-attr]


def _scale_all_gradients(side: Side) -> None:
    for parameter in side.model.parameters():
        parameter.grad.mul_(2.0)  # type: ignore[union-attr]


def _new_gradient(side: Side) -> None:
    parameter = list(side.model.parameters())[2]
    parameter.grad = torch.ones_like(parameter)


def _no_gradient(side: Side) -> None:
    list(side.model.parameters())[2].grad = None


def _lower_the_rate(side: Side) -> None:
    for group in side.optimizer.param_groups:
        group["lr"] *= 0.5


def _read_states(side: Side) -> Any:
    return [state["exp_avg_sq"].sum() for state in side.optimizer.state.values()]


def _write_states(side: Side) -> None:
    for state in side.optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def _forget_a_state(side: Side) -> None:
    side.optimizer.state.pop(next(iter(side.optimizer.state)), None)


def _count_again(side: Side) -> None:
    for state in side.optimizer.state.values():
        state["step"].fill_(1)


def _reload(side: Side) -> None:
    side.optimizer.load_state_dict(side.optimizer.state_dict())
    side.model.load_state_dict(side.model.state_dict())


def _skip(side: Side) -> None:
    side.optimizer.zero_grad()


def _fill_with_zeros(side: Side) -> None:
    side.optimizer.zero_grad(set_to_none=False)


def _backward_again(side: Side) -> torch.Tensor:
    loss = side.loss(1000)
    loss.backward()
    return loss.detach()


def _evaluate(side: Side) -> torch.Tensor:
    with torch.no_grad():
        return side.loss(2000)


def _fail_in_backward(side: Side) -> None:
    blocks = next(child for child in side.model.children() if isinstance(child, nn.ModuleList))

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = blocks[len(blocks) // 2].register_full_backward_hook(fail)
    try:
        with pytest.raises(ZeroDivisionError):
            side.loss(3000).backward()
    finally:
        handle.remove()
    side.optimizer.zero_grad()


BETWEEN: list[Callable[[Side], Any]] = [
    _read_weights,
    _write_a_weight,
    _write_through_data,
    _scale_a_gradient,
    _scale_all_gradients,
    _new_gradient,
    _no_gradient,
    _lower_the_rate,
    _read_states,
    _write_states,
    _forget_a_state,
    _count_again,
    _reload,
    _skip,
    _fill_with_zeros,
    _backward_again,
    _evaluate,
    _fail_in_backward,
]


@pytest.mark.parametrize("between", BETWEEN, ids=lambda action: action.__name__[1:])
def test_what_user_code_does_before_the_step(between: Callable[[Side], Any], device: torch.device) -> None:
    with Pair(CHAIN, device=device, ahead=True) as pair:
        for number in range(14):
            pair.both(lambda side, n=number: _backward(side, n), "loss")  # type: ignore[misc]
            if number in (4, 5, 9):
                assert ahead_of(pair).begun or number < 5
                pair.both(between)
            pair.both(lambda side: (side.optimizer.step(), side.optimizer.zero_grad())[1])
        pair.check()
        assert ahead_of(pair).taken_over > 10


def _backward(side: Side, number: int) -> torch.Tensor:
    loss = side.loss(number)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("parts", [(2, 2, 2, 2, 2), (1, 2, 1, 3, 3, 3, 1, 1, 1)], ids=str)
def test_accumulation(parts: tuple[int, ...], device: torch.device) -> None:
    with Pair(LLAMA, device=device, ahead=True) as pair:
        for number, count in enumerate(parts):
            for part in range(count):
                pair.both(lambda side, n=10 * number + part: _backward(side, n), "loss")  # type: ignore[misc]
            pair.both(lambda side: (side.optimizer.step(), side.optimizer.zero_grad())[1])
        pair.check()
        assert ahead_of(pair).taken_over


def test_several_groups_and_a_scheduler(device: torch.device) -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        some, others = list(model.parameters())[::2], list(model.parameters())[1::2]
        groups = [{"params": some, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, fused=True)

    with Pair(CHAIN, optimizer, device=device, ahead=True) as pair:
        schedulers = {
            id(side): torch.optim.lr_scheduler.LambdaLR(side.optimizer, lambda n: 1 / (n + 1))
            for side in (pair.plain, pair.streamed)
        }
        for number in range(8):
            pair.steps(1, number)
            pair.both(lambda side: schedulers[id(side)].step())
        pair.check()
        assert ahead_of(pair).taken_over


def test_checkpoints(device: torch.device, tmp_path: Path) -> None:
    """Saved while updates are ahead, in the background too; resumed with and without them."""
    plain: dict[str, Any] = {}

    def note(name: str) -> None:
        plain[name] = frozen((pair.plain.model.state_dict(), pair.plain.optimizer.state_dict()))

    with Pair(CHAIN, device=device, ahead=True) as pair:
        pair.steps(4)
        note("one")
        pair.session.save(tmp_path / "one", wait=False)
        pair.steps(3, 4)
        pair.both(lambda side: _backward(side, 7), "loss")
        pair.both(_skip)
        note("two")
        pair.session.save(tmp_path / "two")
    for name, is_ahead, steps in (("one", False, 4), ("two", True, 7)):
        with Pair(CHAIN, device=device, ahead=is_ahead) as other:
            other.session.load(tmp_path / name)
            other.plain.model.load_state_dict(plain[name][0])
            other.plain.optimizer.load_state_dict(plain[name][1])
            other.steps(4, steps)
            other.check()


def test_a_session_that_ends(device: torch.device) -> None:
    with Pair(CHAIN, device=device, ahead=True) as pair:
        pair.steps(5)
        assert ahead_of(pair).taken_over
    pair.check(grads=False)
    for number in range(5, 8):
        assert torch.equal(pair.plain.step(number).cpu(), pair.streamed.step(number).cpu()) or device.type != "cpu"


def test_memory_that_is_given_back() -> None:
    with Pair(CHAIN, ahead=True) as pair:
        adam = pair.session._parts.adam
        assert adam is not None
        pair.steps(4)
        taken, before = adam.spare_bytes, pair.session.plan.optimizer
        assert taken > 0
        assert "updated in backward" in str(before)
        ledger = pair.session.ledger
        used = sum(balance.used_bytes for balance in ledger.balances())
        adam.stop_ahead()
        assert used - sum(balance.used_bytes for balance in ledger.balances()) >= taken
        assert adam.spare_bytes == adam.ahead_units == 0
        pair.steps(4, 4)
        pair.check()
