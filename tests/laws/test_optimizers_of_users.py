"""Law: what users do to their optimizer object beyond calling it means what it means without streaming."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch

from .models import (
    CHAIN,
    Pair,
    Side,
    adamw,
    one_thread,  # noqa: F401  # a fixture
    sgd,
)

optim = torch.optim


# --- methods that are the user's


def halve_gradients(optimizer: optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def set_own_step(side: Side) -> None:
    """The step halves the gradients, then does what it did."""
    target: Any = side.optimizer
    before = target.step

    def step(self: optim.Optimizer, closure: Any = None) -> Any:
        halve_gradients(self)
        return before(closure)

    target.step = types.MethodType(step, target)


def set_own_zero_grad(side: Side) -> None:
    target: Any = side.optimizer
    target.count, before = 0, target.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        target.count += 1
        before(set_to_none)

    target.zero_grad = zero_grad


def schedule(side: Side) -> None:
    """A scheduler wraps the step that it finds."""
    side.scheduler = optim.lr_scheduler.StepLR(side.optimizer, 1, gamma=0.5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
@pytest.mark.parametrize("scheduled", ["", "before", "after"])
def test_a_step_that_was_set_before(make: Any, scheduled: str) -> None:
    calls: list[optim.Optimizer] = []

    def prepare(side: Side) -> None:
        side.optimizer.register_step_post_hook(lambda optimizer, *_: calls.append(optimizer))
        for action in {"before": [schedule, set_own_step], "after": [set_own_step, schedule]}.get(
            scheduled, [set_own_step]
        ):
            action(side)

    with Pair(CHAIN, make, before=prepare) as pair:
        pair.steps(3)
        pair.check()
        assert calls.count(pair.streamed.optimizer) == calls.count(pair.plain.optimizer) == 3
    pair.steps(2, start=3)  # the user's is there again
    pair.check()


def test_a_step_that_was_set_before_cannot_run_unit_by_unit() -> None:
    with pytest.raises(ValueError, match="step="):
        Pair(CHAIN, sgd, before=set_own_step, step="backward")


def test_a_step_that_was_set_while_streaming_stays() -> None:
    with Pair(CHAIN, sgd) as pair:
        pair.both(set_own_step)
        pair.steps(2)
    pair.steps(2, start=2)
    pair.check()


@pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
def test_a_zero_grad_that_was_set_before(make: Any) -> None:
    with Pair(CHAIN, make, before=set_own_zero_grad) as pair:
        pair.steps(3)
        pair.check()
        assert pair.both(lambda side: side.optimizer.count) == 3  # type: ignore[attr-defined]
    pair.steps(2, start=3)
    assert pair.both(lambda side: side.optimizer.count) == 5  # type: ignore[attr-defined]


class CountsZeroGrad(optim.AdamW):
    count = 0

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1
        super().zero_grad(*args, **kwargs)


class KeepsGradients(optim.SGD):
    """Decays gradients where others forget them."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        del set_to_none
        halve_gradients(self)


def test_a_subclass_has_its_own_zero_grad() -> None:
    with Pair(CHAIN, lambda model: CountsZeroGrad(model.parameters(), lr=1e-2, fused=True)) as pair:
        pair.steps(3)
        pair.check()
        assert pair.both(lambda side: side.optimizer.count) == 3  # type: ignore[attr-defined]
    with Pair(CHAIN, lambda model: KeepsGradients(model.parameters(), lr=0.1)) as pair:
        pair.steps(3)
        pair.check()


optim.SGD([torch.zeros(1, requires_grad=True)])  # from here on SGD.step is in torch's wrapper


class Wrapping(optim.SGD):
    """``functools.wraps`` makes its step look like torch's wrapper, which says "hooked" and has the original."""

    @functools.wraps(optim.SGD.step)
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        halve_gradients(self)
        return super().step(closure)


def test_a_step_with_functools_wraps() -> None:
    calls: list[optim.Optimizer] = []

    def prepare(side: Side) -> None:
        side.optimizer.register_step_post_hook(lambda optimizer, *_: calls.append(optimizer))

    with Pair(CHAIN, lambda model: Wrapping(model.parameters(), lr=0.1), before=prepare) as pair:
        pair.steps(3)
        pair.check()
        assert calls.count(pair.streamed.optimizer) == calls.count(pair.plain.optimizer)
