"""Law: every optimizer of torch.optim, and those that users write, updates streamed weights as it would plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stormtorch as storm

from .models import (
    CHAIN,
    OTHERS,
    Case,
    Chain,
    Pair,
    Side,
    cross_entropy,
    one_thread,  # noqa: F401  # a fixture
    tokens,
)

optim = torch.optim


class SignDescent(optim.Optimizer):
    """What a user writes: one parameter at a time, with a state of its own."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    momentum.mul_(group["beta"]).add_(parameter.grad)
                    parameter.sub_(momentum.sign(), alpha=group["lr"])
        return loss


class WholeNorm(optim.Optimizer):
    """What no part of the parameters can compute alone: every update depends on all gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = nn.utils.get_total_norm([parameter.grad for parameter in held])
        for parameter in held:
            parameter.sub_(parameter.grad / total, alpha=self.param_groups[0]["lr"])


class Counting(optim.AdamW):
    """A subclass of a known optimizer is not that optimizer."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.999)
        return loss


MAKERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd-nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd-foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=1e-2, lr_decay=0.01, initial_accumulator_value=0.1),
    "adagrad-fused": lambda p: optim.Adagrad(p, lr=1e-2, fused=True),
    "adam": lambda p: optim.Adam(p, lr=1e-2),
    "adam-fused": lambda p: optim.Adam(p, lr=1e-2, fused=True),
    "adam-l2": lambda p: optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "adam-l2-fused": lambda p: optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
    "adamw-foreach": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-amsgrad": lambda p: optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adamw-amsgrad-fused": lambda p: optim.AdamW(p, lr=1e-2, amsgrad=True, fused=True),
    "adamw-maximize": lambda p: optim.AdamW(p, lr=1e-3, maximize=True),
    "adamw-maximize-fused": lambda p: optim.AdamW(p, lr=1e-3, maximize=True, fused=True),
    "adamw-tensor-lr": lambda p: optim.AdamW(p, lr=torch.tensor(1e-2)),
    "adamw-other-betas": lambda p: optim.AdamW(p, lr=1e-2, betas=(0.3, 0.5), eps=1e-4, fused=True),
    "adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "adadelta": lambda p: optim.Adadelta(p, lr=1.0),
    "asgd": lambda p: optim.ASGD(p, lr=1e-2),
    "rprop": lambda p: optim.Rprop(p, lr=1e-2),
    "nadam": lambda p: optim.NAdam(p, lr=1e-2),
    "radam": lambda p: optim.RAdam(p, lr=1e-2),
    "sign-descent": SignDescent,
    "whole-norm": WholeNorm,
    "subclass": lambda p: Counting(p, lr=1e-2),
}


@pytest.mark.parametrize(
    ("name", "step"),
    [*((name, "forward") for name in MAKERS), ("sgd-nesterov", "serial"), ("adam", "serial"), ("whole-norm", "serial")],
)
def test_five_steps(name: str, step: str) -> None:
    with Pair(CHAIN, lambda model: MAKERS[name](model.parameters()), step=step) as pair:
        pair.steps(5)
        pair.check()


USERS_OWN = ["sign-descent", "whole-norm", "subclass"]


@pytest.mark.parametrize("name", USERS_OWN)
def test_an_optimizer_that_nobody_knows_is_not_run_in_parts(name: str) -> None:
    """It may need the whole gradient, and no promise of the user's changes that: refused in words."""
    with pytest.raises(storm.SettingError, match=r"step=.{0,3}forward"):
        Pair(CHAIN, lambda model: MAKERS[name](model.parameters()), step="backward")


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in USERS_OWN])
def test_five_steps_in_backward(name: str) -> None:
    with Pair(CHAIN, lambda model: MAKERS[name](model.parameters()), step="backward") as pair:
        pair.steps(5)
        pair.check(grads=False)


@pytest.mark.parametrize("name", ["sgd-nesterov", "adafactor", "adam", "sign-descent"])
@pytest.mark.parametrize("case", [c for c in OTHERS if c.name in ("moe", "tied", "lora")], ids=lambda case: case.name)
def test_unused_tied_and_frozen(case: Case, name: str) -> None:
    def trainable(model: nn.Module) -> optim.Optimizer:
        return MAKERS[name]([parameter for parameter in model.parameters() if parameter.requires_grad])

    with Pair(case, trainable) as pair:
        pair.steps(3)
        pair.check()


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # said once, by a CPU without bf16
@pytest.mark.parametrize("step", ["forward", "backward"])
def test_muon_keeps_the_shape_of_a_matrix(step: str) -> None:
    """On matrices only, with the rest frozen: what a flat view of the parameters would get wrong."""

    def muon(model: nn.Module) -> optim.Optimizer:
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.ndim == 2)
        return optim.Muon([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    with Pair(CHAIN, muon, step=step) as pair:
        pair.steps(5)
        pair.check(grads=step == "forward")


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_with_its_closure(line_search: str | None) -> None:
    def lbfgs(model: nn.Module) -> optim.Optimizer:
        return optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn=line_search)

    def step(side: Side) -> object:
        def closure() -> torch.Tensor:
            side.optimizer.zero_grad()
            loss = side.loss(0)
            loss.backward()
            return loss

        return side.optimizer.step(closure)  # type: ignore[arg-type]

    with Pair(CHAIN, lbfgs) as pair:
        for _ in range(3):
            pair.both(step)
        pair.check()


@pytest.mark.parametrize("name", ["adam-fused", "adamw-foreach", "sgd-nesterov", "sign-descent"])
def test_a_closure(name: str) -> None:
    def step(side: Side, number: int) -> object:
        def closure() -> torch.Tensor:
            side.optimizer.zero_grad()
            loss = side.loss(number)
            loss.backward()
            return loss

        return side.optimizer.step(closure)  # type: ignore[arg-type]

    with Pair(CHAIN, lambda model: MAKERS[name](model.parameters())) as pair:
        for number in range(3):
            pair.both(lambda side, number=number: step(side, number), "loss")  # type: ignore[misc]
        pair.check()


class Looked(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 32, sparse=True)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's Adagrad makes such a tensor itself
@pytest.mark.parametrize("kind", [optim.SGD, optim.Adagrad])
def test_sparse_gradients(kind: type[optim.Optimizer]) -> None:
    case = Case("sparse", Looked, tokens, cross_entropy)
    with Pair(case, lambda model: kind(model.parameters(), lr=0.1)) as pair:  # type: ignore[call-arg]
        pair.steps(5)
        pair.check()
