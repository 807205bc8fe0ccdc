"""Law: every optimizer of torch.optim, and those that users write, updates streamed weights as it would plain ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stormtorch as storm
from stormtorch.core.notices import forget_notices

from ..thinning import daily
from .models import (
    CHAIN,
    MAX_NORM,
    OTHERS,
    Case,
    Chain,
    Optimizers,
    Pair,
    Side,
    adamw,
    cross_entropy,
    frozen,
    one_thread,  # noqa: F401  # a fixture
    same,
    stream,
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
# Other kernels and settings of classes that other names stand for: five ordinary steps of each are enough every day.
SIBLINGS = (
    *("sgd", "sgd-foreach", "adagrad-fused", "adam-l2-fused", "adamw-foreach", "adamw-amsgrad-fused"),
    *("adamw-maximize-fused", "adamw-other-betas"),
)


@pytest.mark.parametrize(
    ("name", "step"),
    [*((name, "forward") for name in MAKERS), ("sgd-nesterov", "serial"), ("adam", "serial"), ("whole-norm", "serial")],
)
def test_five_steps(name: str, step: str) -> None:
    with Pair(CHAIN, lambda model: MAKERS[name](model.parameters()), step=step) as pair:
        pair.steps(daily(3, 5))
        pair.check()


USERS_OWN = ["sign-descent", "whole-norm", "subclass"]
KNOWN = [
    pytest.param(name, marks=[pytest.mark.wide] if name in SIBLINGS else []) for name in MAKERS if name not in USERS_OWN
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.daily("sgd-nesterov", "adafactor", "adam", "adam-fused", "adamw-amsgrad", "asgd", "radam", "adadelta")
def test_states_of_small_weights_come_and_go(name: str, dtype: torch.dtype) -> None:
    """Plain steps, streamed ones and plain ones again: states have the dtype of the weights, those of masters fp32."""
    model = CHAIN.build().to(dtype)
    optimizer = MAKERS[name](model.parameters())

    def steps() -> set[torch.dtype]:
        for number in range(2):
            CHAIN.loss(model, CHAIN.batch(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [optimizer.state[parameter] for parameter in model.parameters()]
        return {value.dtype for state in states for value in state.values() if torch.is_tensor(value) and value.ndim}

    plain = steps()
    with stream(model, optimizer):
        streamed = steps()
    assert steps() == plain <= {dtype}
    assert streamed - {torch.int16} == ({torch.float32} if plain else set())


def test_numbers_that_torch_has_cast_are_fp32_beside_masters() -> None:
    """torch's own ``load_state_dict`` makes them as short as the weights."""
    models = [nn.Linear(8, 8).bfloat16() for _ in range(2)]
    plain, other = (MAKERS["nadam"](model.parameters()) for model in models)
    for parameter in models[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    other.load_state_dict(plain.state_dict())
    assert other.state[models[1].weight]["mu_product"].dtype == torch.bfloat16
    with stream(models[1], other, vram="1MiB"):
        assert other.state[models[1].weight]["mu_product"].dtype == torch.float32
        other.load_state_dict(plain.state_dict())
        assert other.state[models[1].weight]["mu_product"].dtype == torch.float32


@pytest.mark.parametrize("name", ["nadam", "asgd", "adafactor", "adamw-amsgrad", "adagrad", "rprop", "adam"])
def test_a_session_that_does_nothing_leaves_the_states_alone(name: str) -> None:
    """Also those of a parameter that is one number, and the numbers that some optimizers keep beside their states."""
    model = nn.Linear(8, 8).bfloat16()
    model.register_parameter("scale", nn.Parameter(torch.tensor(0.5, dtype=torch.bfloat16)))
    optimizer = MAKERS[name](model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    before = frozen(optimizer.state_dict())
    stream(model, optimizer, vram="1MiB").close()
    same(frozen(optimizer.state_dict()), before, "states")


@pytest.mark.parametrize("name", USERS_OWN)
def test_an_optimizer_that_nobody_knows_is_not_run_in_parts(name: str) -> None:
    """It may need the whole gradient, and no promise of the user's changes that: refused in words."""
    with pytest.raises(storm.SettingError, match=r"step=.{0,3}forward"):
        Pair(CHAIN, lambda model: MAKERS[name](model.parameters()), step="backward")


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.daily(
    "sgd-nesterov", "adafactor", "adam", "adam-fused", "adamw-tensor-lr", "adamw-maximize", "rprop", "nadam"
)
def test_five_steps_in_backward(name: str) -> None:
    with Pair(CHAIN, lambda model: MAKERS[name](model.parameters()), step="backward") as pair:
        pair.steps(daily(3, 5))
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


def test_a_sparse_gradient_outlives_the_session() -> None:
    case = Case("sparse", Looked, tokens, cross_entropy)
    model, plain = case.build(), case.build()
    with stream(model, optim.SGD(model.parameters(), lr=0.1)):
        case.loss(model, case.batch(0)).backward()
    case.loss(plain, case.batch(0)).backward()
    gradient, expected = (m.get_parameter("embed.weight").grad for m in (model, plain))
    assert gradient is not None
    assert expected is not None
    assert gradient.is_sparse
    assert torch.equal(gradient.to_dense(), expected.to_dense())


class Gathered(Chain):
    """A gradient whose every element has an index of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(32))  # so that the other does not lie at the begin of its unit
        self.table = nn.Parameter(torch.randn(32, 32))

    def forward(self, ids: torch.Tensor, order: Any = None) -> torch.Tensor:
        picked = torch.gather(self.table, 1, torch.arange(32).view(-1, 1), sparse_grad=True)
        result: torch.Tensor = super().forward(ids, order) * picked.mean() * self.first
        return result


def test_sparse_gradients_of_single_elements() -> None:
    def run(side: Side, step: int) -> torch.Tensor:
        side.optimizer.zero_grad()
        loss = side.loss(step)
        loss.backward()
        table = side.named("table")
        assert table.grad is not None
        table.grad = table.grad.coalesce()
        side.optimizer.step()
        return loss.detach()

    with Pair(Case("gathered", Gathered, tokens, cross_entropy), lambda m: optim.SGD(m.parameters(), lr=0.1)) as pair:
        for step in range(3):
            pair.both(lambda side, step=step: run(side, step), "loss")  # type: ignore[misc]
        pair.both(lambda side: side.model.state_dict(), "weights")


@pytest.mark.parametrize("make", [Chain, Looked], ids=["dense", "sparse"])
def test_a_graph_that_has_saved_a_weight_is_stopped_after_the_step(make: type[nn.Module]) -> None:
    def run(side: Side) -> None:
        saved = side.named("embed.weight").square().sum()  # a graph of its own, beside the model's
        side.step(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()
        side.optimizer.zero_grad()

    with Pair(Case("saved", make, tokens, cross_entropy), lambda model: optim.SGD(model.parameters(), lr=0.1)) as pair:
        pair.both(run)
        pair.steps(2)
        pair.check()


# ------------------------------------------------------------------------------------------- groups that change later


@pytest.mark.parametrize("name", ["adam-fused", "sgd-nesterov", "sign-descent"])
def test_gradients_of_parameters_that_were_added_later_go_too(name: str) -> None:
    def renew(side: Side) -> None:
        head = nn.Linear(32, 32)
        side.model.head = head
        side.optimizer.add_param_group({"params": list(head.parameters()), "lr": 1e-3})

    with Pair(CHAIN, lambda model: MAKERS[name](model.parameters())) as pair:
        pair.steps(1)
        pair.both(lambda side: side.optimizer.zero_grad())
        pair.both(renew)
        pair.steps(3)
        pair.check()
        pair.both(lambda side: side.optimizer.zero_grad())
        assert all(parameter.grad is None for parameter in pair.streamed.model.parameters())


def test_gradients_of_parameters_that_were_thawed_go_too() -> None:
    model = CHAIN.build()
    model.get_submodule("head").requires_grad_(False)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with stream(model, optimizer):
        model.get_submodule("head").requires_grad_(True)
        CHAIN.loss(model, CHAIN.batch(0)).backward()
        assert model.get_parameter("head.weight").grad is not None
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())


BEYOND: dict[str, Any] = {
    "amsgrad": True,
    "differentiable": True,
    "capturable": True,
    "lr": torch.tensor(1e-2),
    "betas": (torch.tensor(0.9), torch.tensor(0.99)),
}


@pytest.mark.parametrize("step", ["forward", "backward"])
@pytest.mark.parametrize("setting", BEYOND)
def test_what_our_adam_does_not_know_is_refused_when_it_comes_later(setting: str, step: str) -> None:
    """By name, before any weight has changed; taken back, training goes on."""
    with Pair(CHAIN, step=step) as pair:
        pair.steps(1)
        side = pair.streamed
        group = side.optimizer.param_groups[0]
        before, group[setting] = group[setting], BEYOND[setting]
        side.optimizer.zero_grad()
        with pytest.raises(storm.StormError, match=f"{setting}.*close the session"):  # noqa: PT012
            side.loss(1).backward()
            side.optimizer.step()
        group[setting] = before
        pair.steps(2, start=1)
        pair.check(grads=step == "forward")


def test_it_is_refused_in_a_group_that_is_added_or_loaded_too() -> None:
    def some(model: nn.Module) -> optim.Optimizer:
        return optim.AdamW(model.get_submodule("blocks").parameters(), lr=1e-2)

    with Pair(CHAIN, some) as pair:
        optimizer = pair.streamed.optimizer
        saved = optimizer.state_dict()
        saved["param_groups"][0]["amsgrad"] = True
        optimizer.load_state_dict(saved)
        pair.streamed.loss(0).backward()
        with pytest.raises(storm.StormError, match="amsgrad=True"):
            optimizer.step()
        optimizer.param_groups[0]["amsgrad"] = False
        optimizer.step()
        added = list(pair.streamed.model.get_submodule("head").parameters())
        optimizer.add_param_group({"params": added, "amsgrad": True})
        with pytest.raises(storm.StormError, match="amsgrad=True"):
            optimizer.step()


@pytest.mark.parametrize("step", ["forward", "backward"])
@pytest.mark.parametrize(
    "changes",
    [
        {"maximize": True},
        {"foreach": True, "fused": False},
        {"foreach": False, "fused": None},
        {"weight_decay": 0.3, "eps": 1e-4, "betas": (0.5, 0.6)},
        {"decoupled_weight_decay": False},
    ],
    ids=",".join,
)
def test_other_settings_of_a_group_may_change(changes: dict[str, Any], step: str) -> None:
    with Pair(CHAIN, step=step) as pair:
        pair.steps(2)
        pair.both(lambda side: side.optimizer.param_groups[0].update(changes))
        pair.steps(2, start=2)
        pair.check(grads=step == "forward")


@pytest.mark.parametrize("name", ["adam-fused", "sgd-nesterov"])
def test_a_compiled_step(name: str) -> None:
    """There is nothing to compile in it; it does what it does."""

    def step(side: Side, number: int) -> None:
        side.optimizer.zero_grad()
        side.loss(number).backward()
        (side.optimizer.step if side.session is None else torch.compile(side.optimizer.step, backend="eager"))()

    with Pair(CHAIN, lambda model: MAKERS[name](model.parameters())) as pair:
        for number in range(2):
            pair.both(lambda side, number=number: step(side, number))  # type: ignore[misc]
        pair.check()


# ------------------------------------------------------------------------- a state that is there before the first step


@pytest.mark.parametrize("step", ["forward", "backward"])
@pytest.mark.parametrize("count", [0, 100])
def test_a_state_put_in_before_the_first_step(count: int, step: str) -> None:
    """User code loads states for some parameters; the others begin without."""

    def fill(side: Side) -> None:
        for number, parameter in enumerate(side.model.parameters()):
            if number % 3:
                side.optimizer.state[parameter] = {
                    "step": torch.tensor(float(count)),
                    "exp_avg": torch.full_like(parameter, 0.1),
                    "exp_avg_sq": torch.full_like(parameter, 0.2),
                    "note": "a user's own",
                }

    with Pair(CHAIN, step=step) as pair:
        pair.both(fill)
        pair.steps(3)
        pair.check(grads=step == "forward")


def test_it_is_in_a_checkpoint_too(tmp_path: Path) -> None:
    model = CHAIN.build()
    optimizer = adamw(model)
    with stream(model, optimizer) as session:
        head = model.get_parameter("head.weight")
        moment = torch.full_like(head, 0.1)
        optimizer.state[head] = {"step": torch.tensor(7.0), "exp_avg": moment, "exp_avg_sq": moment.clone()}
        session.save(tmp_path / "one")
        optimizer.state.clear()
        session.load(tmp_path / "one")
        same(frozen(optimizer.state[head]["exp_avg"]), moment, "exp_avg")
        assert optimizer.state[head]["step"].item() == 7


@pytest.mark.parametrize("name", ["adam-fused", "adam-l2", "sgd-nesterov", "sign-descent"])
@pytest.mark.daily("adam-l2", "sign-descent")
def test_a_step_that_was_bound_before_streaming(name: str) -> None:
    """It is torch's own, on streamed parameters; in turns with ours."""
    bound: dict[int, Callable[[], object]] = {}

    def bind(side: Side) -> None:
        bound[id(side)] = side.optimizer.step

    def step(side: Side, number: int) -> torch.Tensor:
        side.optimizer.zero_grad()
        loss = side.loss(number)
        loss.backward()
        (bound[id(side)] if number in (0, 1, 4) else side.optimizer.step)()
        return loss.detach()

    with Pair(CHAIN, lambda model: MAKERS[name](model.parameters()), before=bind) as pair:
        for number in range(6):
            pair.both(lambda side, number=number: step(side, number), "loss")  # type: ignore[misc]
        pair.check()


# ------------------------------------------------------------------------------------------ parameters beside the model


def with_weights(make: Callable[[Any], optim.Optimizer]) -> Optimizers:
    """An optimizer that also holds eight weights of the loss."""

    def build(model: nn.Module) -> optim.Optimizer:
        weights = nn.Parameter(torch.zeros(8))
        return make([{"params": list(model.parameters())}, {"params": [weights], "lr": 1e-2}])

    return build


def weights_of(side: Side) -> torch.Tensor:
    found: torch.Tensor = side.optimizer.param_groups[1]["params"][0]
    return found


def weighted(side: Side, number: int, clip: bool = False) -> list[torch.Tensor]:
    side.optimizer.zero_grad()
    weights = weights_of(side)
    assert weights.grad is None
    loss = side.loss(number) * weights[0].exp() + weights[1:].square().sum() + weights[1:].sum()
    loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(side.model.parameters(), MAX_NORM) if side.session is None else (
            side.session.clip_grad_norm_(MAX_NORM)
        )
    side.optimizer.step()
    return [loss.detach(), weights.detach()]


BESIDE = ["adam-fused", "adamw-amsgrad", "sgd-nesterov", "adafactor"]


@pytest.mark.parametrize(
    ("name", "step"),
    [*itertools.product(BESIDE, ["forward", "backward"]), ("adam-fused", "serial"), ("sign-descent", "forward")],
)
def test_an_optimizer_that_holds_more_than_the_model(name: str, step: str) -> None:
    with Pair(CHAIN, with_weights(MAKERS[name]), step=step) as pair:
        for number in range(3):
            pair.both(lambda side, number=number: weighted(side, number), "loss")  # type: ignore[misc]
        pair.check(grads=step != "backward")
        saved = [frozen(side.optimizer.state_dict()) for side in (pair.plain, pair.streamed)]
        pair.both(lambda side: weighted(side, 3), "loss")
        pair.both(lambda side: side.optimizer.load_state_dict(saved[side.session is not None]))
        pair.both(lambda side: weighted(side, 4), "loss")
        pair.check(grads=step != "backward")
        weights = weights_of(pair.streamed)
    pair.both(lambda side: weighted(side, 5), "loss after close()")
    assert type(weights) is nn.Parameter


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_beside_the_model_may_have_what_our_adam_does_not_know(when: str) -> None:
    def change(side: Side) -> None:
        side.optimizer.param_groups[1].update(amsgrad=True, fused=False, foreach=False)

    with Pair(CHAIN, with_weights(MAKERS["adam-fused"]), before=change if when == "before" else None) as pair:
        pair.both(change)
        for number in range(3):
            pair.both(lambda side, number=number: weighted(side, number), "loss")  # type: ignore[misc]
        pair.check()
        assert "max_exp_avg_sq" in pair.streamed.optimizer.state[weights_of(pair.streamed)]


def test_clipping_is_of_the_model_alone() -> None:
    with Pair(CHAIN, with_weights(MAKERS["sgd"])) as pair:  # torch's own norm
        for number in range(3):
            pair.both(lambda side, number=number: weighted(side, number, clip=True), "loss")  # type: ignore[misc]
        pair.check()
    with Pair(CHAIN, with_weights(MAKERS["adam-fused"])) as pair:  # ours, added up in another order
        for number in range(3):
            results = [weighted(side, number, clip=True) for side in (pair.plain, pair.streamed)]
            torch.testing.assert_close(results[1], results[0])


class Weighted(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.weight.exp().mean() + self.weight.sum()


@pytest.mark.parametrize("name", ["adam-fused", "sgd-nesterov"])
def test_a_checkpoint_has_the_states_of_all_and_says_what_it_has_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    def parts(seed: int) -> tuple[nn.Module, Weighted, optim.Optimizer]:
        torch.manual_seed(seed)
        model, criterion = Chain(), Weighted()
        return model, criterion, MAKERS[name](itertools.chain(model.parameters(), criterion.parameters()))

    def train(model: nn.Module, criterion: Weighted, optimizer: optim.Optimizer, numbers: range) -> Any:
        for number in numbers:
            optimizer.zero_grad()
            criterion(cross_entropy(model, tokens(number))).backward()
            optimizer.step()
        return frozen([model.state_dict(), criterion.state_dict(), optimizer.state_dict()])

    forget_notices()
    mine = parts(0)
    with stream(mine[0], mine[2]) as session:
        train(*mine, range(2))
        session.save(tmp_path / "one", also={"criterion": mine[1]})
        assert "values" not in caplog.text
        session.save(tmp_path / "two")
        assert "holds 1 parameters that the model does not" in caplog.text
        expected = train(*mine, range(2, 4))
    other = parts(1)
    with stream(other[0], other[2]) as session:
        session.load(tmp_path / "one", also={"criterion": other[1]})
        same(train(*other, range(2, 4)), expected, "later")


def two_models(how: str) -> Any:
    torch.manual_seed(0)
    first, second = Chain(4), Chain(4)
    optimizer = MAKERS["adam-fused"](itertools.chain(first.parameters(), second.parameters()))
    with ExitStack() as stack:
        if how == "together":
            stack.enter_context(stream(nn.ModuleList([first, second]), optimizer))
        elif how != "plain":
            stack.enter_context(stream(first, optimizer))
        if how == "second without":
            stack.enter_context(stream(second))
        for number in range(3):
            optimizer.zero_grad()
            (cross_entropy(first, tokens(number)) * cross_entropy(second, tokens(number + 7))).backward()
            optimizer.step()
        return frozen([first.state_dict(), second.state_dict(), optimizer.state_dict()])


@pytest.mark.parametrize("how", ["first", "second without", "together"])
def test_one_optimizer_over_two_models(how: str) -> None:
    same(two_models(how), two_models("plain"), how)


def test_an_optimizer_belongs_to_one_session() -> None:
    first, second = Chain(4), Chain(4)
    optimizer = MAKERS["adam-fused"](itertools.chain(first.parameters(), second.parameters()))
    with stream(first, optimizer):
        with pytest.raises(storm.SettingError, match="ModuleList"):
            stream(second, optimizer)
        assert all(type(parameter) is nn.Parameter for parameter in second.parameters())
    stream(second, optimizer).close()


# ---------------------------------------------------------------------------------------- optimizers that wrap others


def _lookahead(self: Any, inner: optim.Optimizer) -> None:
    self.inner, self.count = inner, 0
    self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]


class Lookahead(optim.Optimizer):
    """As several are: an Optimizer by name, without its ``__init__``."""

    __init__ = _lookahead
    count: int

    def __getattr__(self, name: str) -> Any:
        if name in ("param_groups", "state", "defaults"):
            return getattr(self.inner, name)
        raise AttributeError(name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            held: Iterator[nn.Parameter] = (p for group in self.inner.param_groups for p in group["params"])
            for parameter, slow in zip(held, self.slow, strict=True):
                slow.lerp_(parameter.data, 0.5)
                parameter.data.copy_(slow)


class NoOptimizer:
    """As others are: what an Optimizer has, and no Optimizer."""

    __init__ = _lookahead


@pytest.mark.parametrize("kind", [Lookahead, NoOptimizer])
def test_a_wrapper_is_refused_and_says_what_is_inside(kind: Any) -> None:
    model = CHAIN.build()
    with pytest.raises(storm.SettingError, match=r"optimizer\.inner"):
        stream(model, kind(adamw(model)))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize("name", ["adam-fused", "sgd-nesterov"])
def test_what_is_inside_is_streamed(name: str) -> None:
    wrappers: dict[int, Lookahead] = {}

    def wrap(side: Side) -> None:
        wrappers[id(side)] = Lookahead(side.optimizer)

    def step(side: Side, number: int) -> torch.Tensor:
        loss = side.loss(number)
        loss.backward()
        wrappers[id(side)].step()
        wrappers[id(side)].zero_grad()
        return loss.detach()

    with Pair(CHAIN, lambda model: MAKERS[name](model.parameters()), before=wrap) as pair:
        for number in range(5):
            pair.both(lambda side, number=number: step(side, number), "loss")  # type: ignore[misc]
        pair.check()


# ------------------------------------------------------------------------------------------- steps that are left out

DROPPING: dict[str, Callable[[Side], object]] = {
    "optimizer": lambda side: side.optimizer.zero_grad(),
    "to-zero": lambda side: side.optimizer.zero_grad(set_to_none=False),
    "model": lambda side: side.model.zero_grad(),
    "one": lambda side: setattr(side.named("blocks.3.up.weight"), "grad", None),
}


@pytest.mark.parametrize("name", ["adam-fused", "sgd-nesterov"])
@pytest.mark.parametrize("how", DROPPING)
def test_a_step_that_was_done_in_backward_cannot_be_left_out(how: str, name: str) -> None:
    """Said once; who goes on then has taken that step."""
    with Pair(CHAIN, lambda model: MAKERS[name](model.parameters()), step="backward") as pair:
        for first in (0, 3):
            pair.steps(first and 1, start=first)
            pair.plain.step(first + 1)
            pair.streamed.optimizer.zero_grad()
            pair.streamed.loss(first + 1).backward()
            with pytest.raises(storm.StormError, match=r"half-done.*step=.{0,3}forward"):
                DROPPING[how](pair.streamed)
            pair.streamed.model.zero_grad()
            pair.steps(1, start=first + 2)
        pair.check(grads=False)


@pytest.mark.parametrize("how", ["checkpoint", "state_dict"])
def test_it_can_be_left_out_by_loading(how: str, tmp_path: Path) -> None:
    with Pair(CHAIN, step="backward") as pair:
        pair.steps(2)
        side, optimizer = pair.streamed, pair.streamed.optimizer
        optimizer.zero_grad()
        pair.session.save(tmp_path / "one")
        saved = frozen(side.model.state_dict()), frozen(optimizer.state_dict())
        side.loss(5).backward()
        if how == "checkpoint":
            pair.session.load(tmp_path / "one")
        else:
            side.model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        optimizer.zero_grad()
        pair.steps(2, start=2)
        pair.check(grads=False)


def test_closed_before_the_step_that_backward_has_done() -> None:
    with Pair(CHAIN, step="backward") as pair:
        pair.plain.step(0)
        pair.streamed.loss(0).backward()
    pair.check(grads=False)
    pair.steps(2, start=1)
    pair.check()
