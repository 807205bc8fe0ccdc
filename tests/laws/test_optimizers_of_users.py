"""Law: what users do to their optimizer object beyond calling it means what it means without streaming."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import stormtorch as storm
from stormtorch.core.errors import SettingError
from stormtorch.streams.optimizer.patch import users_own

from ..thinning import daily
from .models import (
    CHAIN,
    VOCABULARY,
    WIDTH,
    Case,
    Chain,
    Pair,
    Side,
    adamw,
    cross_entropy,
    frozen,
    one_thread,  # noqa: F401  # a fixture
    same,
    sgd,
    stream,
    tokens,
)

optim = torch.optim


def test_a_name_is_no_optimizer() -> None:
    with pytest.raises(SettingError, match=r"optimizer='adamw' is a name\. Accepted: an optimizer, such as torch\.opt"):
        storm.stream(nn.Linear(2, 2), "adamw")  # type: ignore[arg-type]  # what users try


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


# --- states that the user keeps, or moves


def alike(side: Side) -> list[nn.Parameter]:
    """Parameters of one shape, in several units."""
    shape = side.named("blocks.0.up.weight").shape
    return [parameter for parameter in side.model.parameters() if parameter.shape == shape]


def clear_and_bring_back(side: Side) -> Any:
    backup = side.optimizer.state_dict()
    side.optimizer.state.clear()
    side.step(3)
    side.step(4)
    kept = frozen(backup)
    side.optimizer.load_state_dict(backup)
    return kept


def bring_back_by_hand(side: Side) -> None:
    """A warm-up of the new weights, say, and then the old states."""
    backup = {parameter: dict(state) for parameter, state in side.optimizer.state.items()}
    side.optimizer.state.clear()
    side.step(3)
    for parameter, state in backup.items():
        side.optimizer.state[parameter] = state


def move(side: Side) -> None:
    state, (first, *_, last) = side.optimizer.state, alike(side)
    state[last] = state.pop(first)


def rotate(side: Side) -> None:
    state, parameters = side.optimizer.state, alike(side)
    entries = [state[parameter] for parameter in parameters]
    for parameter, entry in zip(parameters, entries[1:] + entries[:1], strict=True):
        state[parameter] = entry


def rotate_copies_of_entries(side: Side) -> None:
    """The tensors are others than those that were shown, over the same memory."""
    state, parameters = side.optimizer.state, alike(side)
    entries = [{name: value.detach() for name, value in state[parameter].items()} for parameter in parameters]
    for parameter, entry in zip(parameters, entries[1:] + entries[:1], strict=True):
        state[parameter] = entry


def exchange_one_moment(side: Side) -> None:
    state, (first, second, *_) = side.optimizer.state, alike(side)
    one, other = state[first], state[second]
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def load_what_is_there(side: Side) -> None:
    side.optimizer.load_state_dict(side.optimizer.state_dict())


@pytest.mark.parametrize("kept", [0, 99])
@pytest.mark.parametrize(
    "action",
    [
        clear_and_bring_back,
        bring_back_by_hand,
        move,
        rotate,
        rotate_copies_of_entries,
        exchange_one_moment,
        load_what_is_there,
    ],
)
def test_states_that_are_kept_or_moved(action: Callable[[Side], Any], kept: int) -> None:
    with Pair(CHAIN, adamw, kept=kept) as pair:
        pair.steps(2)
        pair.both(action)
        pair.steps(3, start=5)
        pair.check()


def test_states_rotate_also_where_backward_updates() -> None:
    with Pair(CHAIN, adamw, step="backward") as pair:
        pair.steps(2)
        pair.both(rotate)
        pair.steps(2, start=5)
        pair.check(grads=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_master_does_not_move_with_the_state(dtype: torch.dtype) -> None:
    """It is the weight's own."""
    model = CHAIN.build(dtype)
    optimizer = adamw(model)
    with stream(model, optimizer, seed=0) as session:
        side = Side(model, optimizer, CHAIN, torch.device("cpu"), session)
        side.step(0)
        before = frozen([optimizer.state[parameter]["master"] for parameter in alike(side)])
        rotate(side)
        optimizer.zero_grad()
        optimizer.step()  # which follows the states, and changes nothing
        same(frozen([optimizer.state[parameter]["master"] for parameter in alike(side)]), before, "masters")


# --- gradients that Adam does not take


class LastIsSparse(Chain):
    """The unit that comes last has a sparse gradient, if asked for."""

    sparse = False

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, sparse=True)

    def forward(self, tokens: torch.Tensor, order: Sequence[int] | None = None) -> torch.Tensor:
        x = super().forward(tokens, order)
        return x + self.table(tokens) if self.sparse else x


def test_adam_refuses_a_sparse_gradient_before_it_changes_anything() -> None:
    def step_with_a_sparse_gradient(side: Side) -> str:
        model = side.model
        assert isinstance(model, LastIsSparse)
        model.sparse = True
        side.optimizer.zero_grad()
        side.loss(3).backward()
        with pytest.raises(Exception, match="does not support sparse gradients") as refused:
            side.optimizer.step()
        model.sparse = False
        side.optimizer.zero_grad()
        return str(refused.value)[: len("Adam does not support")]

    with Pair(Case("last-is-sparse", LastIsSparse, tokens, cross_entropy), adamw) as pair:
        pair.steps(2)
        pair.both(step_with_a_sparse_gradient)
        pair.check()
        pair.steps(2, start=4)
        pair.check()


# --- masters and the weights that they belong to


def low_precision(dtype: torch.dtype, optimizers: Callable[[nn.Module], optim.Optimizer]) -> Side:
    model = CHAIN.build(dtype)
    optimizer = optimizers(model)
    return Side(model, optimizer, CHAIN, torch.device("cpu"), stream(model, optimizer, seed=0))


def run_on(side: Side) -> Any:
    for step in range(4, daily(8, 12)):
        side.step(step)
    assert side.session is not None
    states = frozen((side.model.state_dict(), side.optimizer.state_dict()))
    side.session.close()
    return states


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.daily("bf16-2-model", "fp16-0-optimizer")
def test_masters_are_loaded_in_either_order(dtype: torch.dtype, steps: int, first: str) -> None:
    side = low_precision(dtype, adamw)
    for step in range(4):
        side.step(step)
    saved = frozen({"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict()})
    expected = run_on(side)

    side = low_precision(dtype, adamw)
    for step in range(steps):
        side.step(20 + step)
    for name in sorted(saved, key=lambda name: name != first):
        getattr(side, name).load_state_dict(saved[name])
    same(run_on(side), expected, "resumed")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_an_edit_after_loading_in_the_usual_order_is_exact(dtype: torch.dtype) -> None:
    """No master that was loaded outlives another weight than its own."""
    side = low_precision(dtype, adamw)
    side.step(0)
    side.step(1)
    saved = frozen({"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict()})
    side.model.load_state_dict(saved["model"])
    side.optimizer.load_state_dict(saved["optimizer"])
    weight = side.named("head.weight")
    with torch.no_grad():
        weight.fill_(0.3)
    master = side.optimizer.state[weight]["master"]
    expected = torch.zeros_like(weight) if dtype == torch.bfloat16 else weight
    same(frozen(master).float(), frozen(expected).float(), "master")
    assert side.session is not None
    side.session.close()


def test_an_optimizer_of_two_sessions_has_the_users_step_in_both() -> None:
    """A scheduler that was built while streaming has wrapped our step, which falls through to the user's."""
    with Pair(CHAIN, sgd, before=set_own_step) as pair:
        pair.both(schedule)
        pair.steps(2)
    with stream(pair.streamed.model, pair.streamed.optimizer, seed=0):
        pair.steps(2, start=2)
        pair.check()
    with Pair(CHAIN, adamw) as pair:
        pair.both(schedule)
        pair.steps(2)
    with stream(pair.streamed.model, pair.streamed.optimizer, seed=0):
        pair.steps(2, start=2)
        pair.check()
        entry = pair.streamed.optimizer.state[pair.streamed.named("head.weight")]
        assert type(entry["exp_avg"]) is not torch.Tensor  # a view: our own Adam runs, as no step is the user's


@pytest.mark.parametrize("set_own", [set_own_step, set_own_zero_grad])
def test_an_optimizer_with_methods_of_the_users_is_not_kept(set_own: Callable[[Side], None]) -> None:
    pair = Pair(CHAIN, sgd, before=set_own)
    pair.steps(1)
    pair.session.close()
    reference = weakref.ref(pair.streamed.optimizer)
    del pair
    gc.collect()
    assert reference() is None


def test_a_compiled_step_is_the_classs_own() -> None:
    model = CHAIN.build()
    optimizer: Any = adamw(model)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    assert users_own(optimizer, "step") is None
    compiled: Any = adamw(model)
    compiled.step = torch.compile(types.MethodType(halve_gradients, compiled), backend="eager")
    assert users_own(compiled, "step") is compiled.step
