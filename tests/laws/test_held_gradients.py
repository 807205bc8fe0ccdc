"""Law: what a user makes of a gradient, holds of it, puts in its place or hangs on its way is as in plain PyTorch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import stormtorch as storm

from .models import (
    CHAIN,
    VOCABULARY,
    WIDTH,
    Case,
    Pair,
    Side,
    adamw,
    cross_entropy,
    gradients,
    one_thread,  # noqa: F401  # a fixture
    sgd,
    tokens,
)

FAR = "blocks.6.up.weight"  # a parameter in the middle of what moves


ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)  # where backward runs in a thread of its own


def exact(device: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """An optimizer whose updates are the same on this device and at home."""
    return adamw if device == "cpu" else sgd


@pytest.fixture(
    params=[
        ("cpu", 0, "auto"),
        ("cpu", 99, "auto"),
        ("cpu", 0, "recompute"),
        pytest.param(("cuda", 0, "auto"), marks=pytest.mark.gpu),
    ],
    ids=["", "kept", "recomputed", "cuda"],
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """After two steps; with states and gradients at home, or kept on the device."""
    device, kept, activations = request.param
    with Pair(CHAIN, exact(device), device=device, step="forward", kept=kept, activations=activations) as made:
        made.steps(2)
        yield made


def backward(side: Side, step: int) -> None:
    side.loss(step).backward()


def gradient(side: Side, name: str = FAR) -> torch.Tensor:
    found = side.named(name).grad
    assert found is not None
    return found


def go_on(pair: Pair) -> None:
    """Whatever was changed has its effect in the steps that follow."""
    pair.check()
    pair.steps(2, start=50)
    pair.check()


# ---------------------------------------------------------------------------------------------------------- writing


def test_a_write_that_fails_in_the_middle_is_seen_as_far_as_it_came(pair: Pair) -> None:
    def write(side: Side) -> torch.Tensor:
        side.loss(3)  # the copies on the device are the present ones
        first, second = side.named(FAR), side.named("blocks.2.up.weight")
        values = [torch.full_like(first, 0.01), torch.ones(3, 3, device=first.device)]
        with torch.no_grad(), pytest.raises(RuntimeError):
            torch._foreach_copy_([first, second], values)
        return side.loss(4)

    pair.both(write)
    go_on(pair)


def give_gradient_data(side: Side) -> None:
    gradient(side).data = torch.linspace(-1, 1, 64 * 32, device=side.device).view(64, 32)


def give_gradient_data_of_its_own(side: Side) -> None:
    gradient(side).data = gradient(side).flip(0)
    square = gradient(side, "embed.weight")
    square.data = square.t()
    square.data = square.t()  # and back: torch's fused kernels do not look at strides


def set_gradient(side: Side) -> None:
    grad: Any = gradient(side)
    grad.set_(torch.full((64, 32), 0.01, device=side.device))


def give_state_data(side: Side) -> None:
    state = side.optimizer.state[side.named(FAR)]
    state["exp_avg"].data = torch.full((64, 32), 0.01, device=side.device)
    state["exp_avg_sq"].set_(torch.full((64, 32), 0.25, device=side.device))


def give_data_to_something_made_of_it(side: Side) -> None:
    made = gradient(side).detach()
    made.data = torch.ones(64, 32, device=side.device)  # that is made's own affair


@pytest.mark.parametrize(
    "write",
    [
        give_gradient_data,
        give_gradient_data_of_its_own,
        set_gradient,
        give_state_data,
        give_data_to_something_made_of_it,
    ],
)
def test_other_memory_for_a_gradient_or_a_state_is_other_values(pair: Pair, write: Callable[[Side], None]) -> None:
    if write is give_state_data and pair.plain.device.type == "cuda":
        pytest.skip("the optimizer here has no states")

    def run(side: Side) -> list[torch.Tensor]:
        side.optimizer.zero_grad()
        backward(side, 3)
        held, made = gradient(side), gradient(side).view(-1)
        write(side)
        side.optimizer.step()
        return [held, made, gradient(side)]

    pair.both(run)
    go_on(pair)


# ---------------------------------------------------------------------------------------------------------- holding

MADE: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda grad: grad,
    "detach": lambda grad: grad.detach(),
    "data": lambda grad: grad.data,
    "view": lambda grad: grad.view(-1)[5:70],
    "row": lambda grad: grad[3],
    "transposed": lambda grad: grad.t()[::2],
    "other_dtype": lambda grad: grad.view(torch.int32),
    "of_another": lambda grad: grad.detach().data[1:].view(-1),
    "rows": lambda grad: list(grad.unbind()),
    "chunks": lambda grad: grad.chunk(3),
}


@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize("made", MADE)
@pytest.mark.daily("detach", "rows", "view", "other_dtype", "row", "of_another")
def test_what_is_made_of_a_gradient_outlives_it(pair: Pair, made: str, to_none: bool) -> None:
    def run(side: Side) -> list[Any]:
        side.optimizer.zero_grad()
        backward(side, 3)
        kept = MADE[made](gradient(side))
        side.optimizer.step()
        side.optimizer.zero_grad(set_to_none=to_none)
        backward(side, 4)
        backward(side, 5)
        side.optimizer.step()
        return [kept, gradient(side)]

    pair.both(run)
    go_on(pair)


@pytest.mark.parametrize("drop", ["zero_grad", "None", "assign"])
def test_all_that_is_held_of_one_gradient_stays_one(pair: Pair, drop: str) -> None:
    def run(side: Side) -> list[Any]:
        side.optimizer.zero_grad()
        backward(side, 3)
        first, second, row = gradient(side), gradient(side), gradient(side)[5]
        if drop == "zero_grad":
            side.optimizer.zero_grad()
        else:
            side.named(FAR).grad = None if drop == "None" else torch.ones_like(first)
        first.mul_(2)
        made = first.detach()  # later than the gradient's end
        backward(side, 4)
        row.add_(1)
        made[6] = 3.0
        side.optimizer.step()
        return [first, second, row, made, gradient(side)]

    pair.both(run)
    go_on(pair)


def test_a_held_gradient_sees_what_is_added(pair: Pair) -> None:
    def run(side: Side) -> list[Any]:
        side.optimizer.zero_grad()
        backward(side, 3)
        held, made = gradient(side), gradient(side)[2:4]
        backward(side, 4)
        made.mul_(3)
        return [held, made, gradient(side)]

    pair.both(run)
    pair.both(lambda side: side.optimizer.step())
    go_on(pair)


def test_a_weight_given_a_dropped_gradient(pair: Pair) -> None:
    """``p.data = x``, where ``x`` is ours too."""

    def run(side: Side) -> torch.Tensor:
        held = gradient(side)
        side.optimizer.zero_grad()
        side.named(FAR).data = held
        held.mul_(2)
        return side.loss(4)

    pair.both(run)
    go_on(pair)


# ------------------------------------------------------------------------------------------------------ on their way


class Halves(nn.Module):
    """Two layers in one unit, of which a forward uses one, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        x = self.first(x) if "1" in which else x
        return torch.as_tensor(self.second(x) if "2" in which else x)


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.which = "12"
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Halves() for _ in range(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.which)
        return torch.as_tensor(self.head(x))


HALVES = Case("halves", Choosing, tokens, cross_entropy)
SECOND = "blocks.3.second.weight"


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_are_silent_where_nothing_comes(kind: str, when: str, device: str) -> None:
    calls: list[int] = []

    def hang(side: Side) -> None:
        def on_gradient(number: int, grad: torch.Tensor) -> torch.Tensor:
            calls.append(number)
            return grad.clamp(-1e-3, 1e-3)

        def on_parameter(number: int, parameter: torch.Tensor) -> None:
            calls.append(number)
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        hook: Callable[..., Any] = on_gradient if kind == "register_hook" else on_parameter
        for number in range(2):
            getattr(side.named(SECOND), kind)(functools.partial(hook, number))

    def count(side: Side, which: str, *, direct: bool, number: int) -> list[Any]:
        calls.clear()
        side.model.which = which  # type: ignore[assignment]
        loss, weight = side.loss(number), side.named(SECOND)
        (loss + weight.square().sum() if direct else loss).backward()
        return [weight.grad, list(calls)]

    with Pair(HALVES, exact(device), device=device, step="forward", before=hang if when == "before" else None) as pair:
        if when == "during":
            hang(pair.plain)
            hang(pair.streamed)
        cases = [("12", False), ("1", False), ("1", True), ("1", False), ("12", True), ("2", False)]
        for number, (which, direct) in enumerate(cases):
            pair.both(lambda side, w=which, d=direct, n=number: count(side, w, direct=d, number=n))  # type: ignore[misc]
        pair.both(lambda side: side.optimizer.step())
        pair.both(lambda side: side.optimizer.zero_grad())
        for number, (which, direct) in enumerate(cases[1:]):
            pair.both(lambda side, w=which, d=direct, n=number: count(side, w, direct=d, number=n))  # type: ignore[misc]
        pair.both(lambda side: side.optimizer.step())
        pair.check()


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_was_silent_can_be_removed(kind: str) -> None:
    with Pair(HALVES, adamw, step="forward") as pair:

        def run(side: Side) -> list[Any]:
            calls: list[int] = []
            handle = getattr(side.named(SECOND), kind)(lambda _: calls.append(1))
            for which in ("1", "12"):
                side.model.which = which  # type: ignore[assignment]
                backward(side, 3)
            handle.remove()
            backward(side, 4)
            return [calls, side.named(SECOND).grad]

        pair.both(run)


def test_a_hook_that_comes_after_the_forward_needs_a_gradient() -> None:
    """torch would call it without one."""
    calls: list[int] = []
    with Pair(HALVES, adamw, step="forward") as pair:
        side = pair.streamed
        for which, refused in (("1", True), ("12", False)):
            side.model.which = which  # type: ignore[assignment]
            loss = side.loss(3)
            handle = side.named(SECOND).register_hook(lambda _: calls.append(1))
            with pytest.raises(storm.StormError, match="between forward and backward") if refused else nullcontext():
                loss.backward()
            handle.remove()
    assert calls == [1]


def freeze_between_forward_and_backward(side: Side, *, hooked: bool) -> list[Any]:
    side.optimizer.zero_grad()
    calls: list[int] = []
    handle = side.named(FAR).register_hook(lambda _: calls.append(1)) if hooked else None
    loss = side.loss(3)
    side.named(FAR).requires_grad_(False)
    loss.backward()
    seen, still = gradients(side.model), side.named(FAR).requires_grad
    side.optimizer.step()
    side.named(FAR).requires_grad_(True)
    if handle is not None:
        handle.remove()
    return [seen, calls, still]


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
def test_frozen_between_forward_and_backward(pair: Pair, hooked: bool) -> None:
    pair.both(functools.partial(freeze_between_forward_and_backward, hooked=hooked), "frozen")
    go_on(pair)


@pytest.mark.parametrize("thawed", [False, True], ids=["frozen", "thawed"])
def test_what_is_recomputed_is_frozen_as_it_was_in_forward(thawed: bool) -> None:
    """Or autograd would save other tensors the second time than the first."""

    def run(side: Side) -> list[Any]:
        weight = side.named(FAR)
        weight.requires_grad_(not thawed)
        side.optimizer.zero_grad()
        loss = side.loss(3)
        weight.requires_grad_(thawed)
        loss.backward()
        return [gradients(side.model), weight.requires_grad]

    with Pair(activations="recompute") as pair:
        pair.steps(3)  # measured, and planned
        assert "recomputed" in pair.session.report().plan.activations.reason
        pair.both(run, "changed in between")
        for side in (pair.plain, pair.streamed):
            side.named(FAR).requires_grad_(True)
        go_on(pair)


# --------------------------------------------------------------------------------------------------------- assigning


class Sparse(nn.Module):
    """A table that is read sparsely, and as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.use = "sparse"
        self.embed = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        sparse = "sparse" in self.use
        x = self.embed(tokens) if sparse else self.head.weight[tokens]
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.t() if "dense" in self.use else torch.as_tensor(self.head(x))


SPARSE = Case("sparse", Sparse, tokens, cross_entropy)


@pytest.mark.parametrize("look", [False, True], ids=["", "looking"])
@pytest.mark.parametrize(
    "uses",
    [
        ("sparse", "dense"),
        ("dense", "sparse"),
        ("sparse", "sparse", "dense", "dense", "sparse"),
        ("dense", "dense", "sparse", "sparse"),
        ("sparse+dense", "sparse", "dense"),
    ],
    ids=" ".join,
)
def test_sparse_and_dense_gradients_add_up(uses: tuple[str, ...], look: bool) -> None:
    def run(side: Side) -> list[Any]:
        side.optimizer.zero_grad()
        seen = []
        for number, use in enumerate(uses):
            side.model.use = use  # type: ignore[assignment]
            backward(side, number)
            if look:
                seen.append(gradient(side, "embed.weight").clone())
        final = gradient(side, "embed.weight").clone()
        side.optimizer.step()
        return [*seen, final, final.layout == torch.strided]

    with Pair(SPARSE, sgd, step="forward") as pair:
        for _ in range(2):
            pair.both(run)
        pair.check()


def test_a_sparse_gradient_can_be_assigned() -> None:
    def run(side: Side) -> list[Any]:
        backward(side, 3)
        held, weight = gradient(side), side.named(FAR)
        weight.grad = torch.eye(64, 32, device=side.device).to_sparse(1)  # as those of embeddings
        first = gradient(side).clone()
        side.optimizer.step()
        backward(side, 4)
        return [held, first, gradient(side)]

    with Pair(CHAIN, sgd, step="forward") as pair:
        pair.both(run)
        go_on(pair)


UNLIKE: dict[str, Callable[[], Any]] = {
    "shape": lambda: torch.ones(3, 3),
    "dtype": lambda: torch.ones(64, 32, dtype=torch.float64),
    "type": lambda: 5,
    "sparse": lambda: torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("unlike", UNLIKE)
def test_what_cannot_be_a_gradient_is_refused_and_changes_nothing(pair: Pair, unlike: str) -> None:
    def run(side: Side) -> list[Any]:
        side.optimizer.zero_grad()
        backward(side, 3)
        held = gradient(side)
        value = UNLIKE[unlike]()
        with pytest.raises(TypeError if unlike == "type" else RuntimeError, match="assign"):
            side.named(FAR).grad = value
        held.mul_(2)
        seen = gradient(side).clone()
        side.optimizer.step()
        return [seen]

    pair.both(run)
    go_on(pair)


def test_a_sparse_gradient_of_elements_is_added_where_it_belongs() -> None:
    def run(side: Side) -> list[Any]:
        backward(side, 3)
        columns = torch.arange(4, device=side.device).expand(64, 4)
        torch.gather(side.named(FAR), 1, columns, sparse_grad=True).sum().backward()
        return [gradients(side.model)]

    with Pair(CHAIN, sgd, step="forward") as pair:
        pair.both(run)
        pair.both(lambda side: side.optimizer.step())
        go_on(pair)


# ---------------------------------------------------------------------------------------------- Python's own protocols


def test_numbers_are_formatted(pair: Pair) -> None:
    def run(side: Side) -> list[str]:
        bias = side.named("head.bias")
        return [f"{bias.data[0]:.3f}", f"{gradient(side, 'head.bias')[1]:>12.2e}", f"{bias.detach()[2]}"]

    pair.both(run)


def test_a_copy_shares_memory_and_writes_are_seen(pair: Pair) -> None:
    def run(side: Side) -> list[Any]:
        side.loss(3)
        weight = side.named(FAR)
        other = copy.copy(weight)
        assert isinstance(other, nn.Parameter)
        assert other.requires_grad
        assert other.is_leaf
        assert other.grad is None
        with torch.no_grad():
            other.mul_(0.5)
            copy.copy(weight.data).add_(0.01)
        other.square().sum().backward()
        copy.copy(gradient(side)).mul_(3)
        side.optimizer.step()
        return [other, other.grad, weight, gradient(side), side.loss(4)]

    pair.both(run)
    go_on(pair)
