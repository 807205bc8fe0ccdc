"""Law: torch's own clipping, in any loop, gives plain PyTorch's numbers, and does not wait for gradients in RAM."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from stormtorch.streams.gradients.home import GradHome

from .models import CHAIN, MAX_NORM, Pair, Side, adamw, gradients, one_thread, stream  # noqa: F401


@pytest.fixture(params=[0, 99], ids=["", "kept"])
def pair(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    """With states at home, and kept on the device."""
    with Pair(CHAIN, functools.partial(adamw, fused=True), step="forward", kept=request.param) as made:
        yield made


def parameters(side: Side) -> list[nn.Parameter]:
    return list(side.model.parameters())


def far(side: Side) -> torch.Tensor:
    """The gradient of a parameter in the middle of what moves."""
    grad = side.named("blocks.6.up.weight").grad
    assert grad is not None
    return grad


def clip(side: Side, norm: float = MAX_NORM) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(side.model.parameters(), norm)


def clip_nothing(side: Side) -> object:
    return clip(side, 1e9)


def clip_to_nothing(side: Side) -> object:
    return clip(side, 0.0)


def clip_twice(side: Side) -> object:
    return clip(side), clip(side, MAX_NORM / 3)


def clip_in_two_calls(side: Side) -> object:
    total = nn.utils.get_total_norm([p.grad for p in parameters(side) if p.grad is not None])
    nn.utils.clip_grads_with_norm_(side.model.parameters(), MAX_NORM, total)
    return total


def clip_each_layer(side: Side) -> object:
    return [nn.utils.clip_grad_norm_(child.parameters(), MAX_NORM / 5) for child in side.model.children()]


def clip_some(side: Side) -> object:
    return nn.utils.clip_grad_norm_(parameters(side)[3:-2], MAX_NORM / 5)


def clip_and_look(side: Side) -> object:
    return clip(side), gradients(side.model)


def clip_and_look_at_one(side: Side) -> object:
    return clip(side), far(side)[0].clone()


def clip_and_drop_one(side: Side) -> object:
    norm = clip(side)
    side.named("blocks.6.up.weight").grad = None
    return norm


def clip_and_edit_one(side: Side) -> object:
    norm = clip(side)
    far(side).add_(1e-3)
    return norm


def scale_by_a_number_that_changes(side: Side) -> object:
    factor = torch.tensor(0.5)
    for parameter in parameters(side):
        assert parameter.grad is not None
        parameter.grad.mul_(factor)
        factor.mul_(0.9)
    return gradients(side.model)


def scale_one_twice(side: Side) -> object:
    factor = torch.tensor(0.3)
    for parameter in (*parameters(side), side.named("blocks.6.up.weight")):
        assert parameter.grad is not None
        parameter.grad.mul_(factor)
    return factor


def scale_through_an_array(side: Side) -> object:
    """Code that holds the memory itself must see the result: nothing may be deferred."""
    array = far(side).detach().cpu().numpy()
    far(side).mul_(torch.tensor(0.25))
    return torch.from_numpy(array.copy())


def clip_by_the_largest(side: Side) -> object:
    return nn.utils.clip_grad_norm_(side.model.parameters(), MAX_NORM, norm_type=float("inf"))


def not_finite(side: Side) -> object:
    far(side)[0] = float("nan")
    return clip(side).isnan()


WAYS = [
    clip, clip_nothing, clip_to_nothing, clip_twice, clip_in_two_calls, clip_each_layer, clip_some, clip_and_look,
    clip_and_look_at_one, clip_and_drop_one, clip_and_edit_one, scale_by_a_number_that_changes, scale_one_twice,
    scale_through_an_array, clip_by_the_largest,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.daily(
    "clip_and_look_at_one",
    "scale_one_twice",
    "clip_to_nothing",
    "clip_twice",
    "scale_by_a_number_that_changes",
    "clip_in_two_calls",
    "clip_each_layer",
    "clip",
    "clip_and_drop_one",
    "scale_through_an_array",
)
def test_clipping_equals_plain(pair: Pair, way: Callable[[Side], object], accumulate: int) -> None:
    def run(side: Side, step: int) -> object:
        for part in range(accumulate):
            side.loss(step * accumulate + part).backward()
        found = way(side)
        side.optimizer.step()
        seen = gradients(side.model) if step == 1 else None
        side.optimizer.zero_grad()
        return found, seen

    for step in range(4):
        pair.both(lambda side, step=step: run(side, step), f"step {step}")  # type: ignore[misc]
    pair.check()


@pytest.mark.parametrize("way", [clip, clip_each_layer, clip_nothing], ids=lambda way: way.__name__)
def test_what_comes_after_clipping(pair: Pair, way: Callable[[Side], object]) -> None:
    """More gradients, a step left out, and gradients dropped, in turn."""

    def run(side: Side, step: int) -> object:
        side.loss(step).backward()
        norm = way(side)
        if step % 3 == 0:
            side.loss(step + 100).backward()  # added to clipped ones
        if step % 3 == 1:
            side.optimizer.zero_grad()
            side.loss(step + 200).backward()  # not clipped
        side.optimizer.step()
        if step % 2:
            side.optimizer.step()  # once more with the same gradients
        side.optimizer.zero_grad()
        return norm

    for step in range(6):
        pair.both(lambda side, step=step: run(side, step), f"norm of step {step}")  # type: ignore[misc]
    pair.check()


def test_gradients_that_are_not_finite(pair: Pair) -> None:
    def run(side: Side) -> object:
        side.loss(0).backward()
        found = not_finite(side)
        side.optimizer.zero_grad()
        return found

    pair.both(run)
    pair.steps(2)
    pair.check()


def test_a_gradient_is_one_object_while_it_is_held(pair: Pair) -> None:
    def run(side: Side) -> list[bool]:
        side.loss(0).backward()
        held = [parameter.grad for parameter in parameters(side)]
        return [parameter.grad is grad for parameter, grad in zip(parameters(side), held, strict=True)]

    assert all(pair.both(run))


@pytest.mark.parametrize("norm", [MAX_NORM, 1e9], ids=["clipped", "not clipped"])
def test_clipping_reads_no_gradient(norm: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms are known when backward ends, and the update scales."""
    with Pair(CHAIN, functools.partial(adamw, fused=True), step="forward") as pair:
        for step in range(3):
            for side in (pair.plain, pair.streamed):
                side.loss(step).backward()
                with monkeypatch.context() as patch:
                    if side is pair.streamed:
                        patch.setattr(GradHome, "join", None)  # a call of it fails
                    clip(side, norm)
                side.optimizer.step()
                side.optimizer.zero_grad()
        pair.check()


def test_gradients_in_bf16_are_rounded_when_they_are_clipped() -> None:
    """As by torch: whether user code reads them afterwards makes no difference to the update."""
    weights = []
    for looks in (False, True):
        model = CHAIN.build(torch.bfloat16)
        optimizer = adamw(model, fused=True)
        side = Side(model, optimizer, CHAIN, torch.device("cpu"))
        with stream(model, optimizer, seed=0, step="forward"):
            for step in range(3):
                side.loss(step).backward()
                clip(side, 0.01)
                if looks:
                    gradients(model)
                optimizer.step()
                optimizer.zero_grad()
            weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))


class Scaled(nn.Linear):
    """A layer with a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_a_parameter_without_dimensions_is_clipped_and_read() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), Scaled())
    plain = copy.deepcopy(model)
    with stream(model, adamw(model), seed=0, step="forward") as session:
        for side in (model, plain):
            side(torch.ones(2, 8)).sum().backward()
        session.clip_grad_norm_(0.01)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad.clone(), other.grad)
