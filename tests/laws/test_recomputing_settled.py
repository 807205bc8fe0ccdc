"""What blocks do in their forward, and user code around them, when blocks count as settled (recompute.py): losses,
gradients, random numbers and ``requires_grad`` are those of plain PyTorch, or there is an error."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stormtorch as storm
from stormtorch.core.errors import StaleGraph
from stormtorch.streams.activations.plans.profiles import ROUNDS

from .models import one_thread, same  # noqa: F401  # a fixture

WIDTH, LATE, PASSES = 16, 4, 7


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are settled in the passes from the third on."""
    monkeypatch.setattr("stormtorch.streams.activations.runner.SETTLED_AT", ROUNDS)


class Block(nn.Module):
    late = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.sigmoid(torch.tanh(self.up(x))))
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model(x)
    return y.square().mean()


def backward(_model: nn.Module, loss: torch.Tensor) -> None:
    loss.backward()


def train_alike(
    block: Callable[[], nn.Module],
    *,
    forward: Callable[[Any, torch.Tensor], torch.Tensor] = loss_of,
    back: Callable[[Any, torch.Tensor], None] = backward,
    root: type[nn.Sequential] = nn.Sequential,
) -> None:
    torch.manual_seed(0)
    plain = root(*(block() for _ in range(4)))
    model = copy.deepcopy(plain)
    way = storm.offload_activations(model, mode="recompute", vram="64MiB", device="cpu")
    with contextlib.closing(way) as activations:
        for step in range(PASSES):
            x, found = torch.randn(8, WIDTH), []
            for side, context in ((plain, contextlib.nullcontext()), (model, activations)):
                for module in side.modules():
                    module.late = step >= LATE  # type: ignore[assignment]
                side.zero_grad()
                torch.manual_seed(step)
                np.random.seed(step)
                with context:
                    loss = forward(side, x.clone())
                back(side, loss)
                state = [(p.grad, p.requires_grad) for p in side.parameters()]
                found.append([loss.detach(), copy.deepcopy(state), torch.rand(1), torch.get_default_dtype()])
            same(found[1], found[0], f"step {step}")


class Residual(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


class WritesResults(nn.Sequential):
    """Autograd has saved none of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = torch.relu_(block(x))
        return x


class GradientInside(Block):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(torch.tanh(self.up(x)) * 2)
        z = x.detach().requires_grad_()
        gradient = torch.autograd.grad(torch.sin(z).sum(), z)[0].mean()
        y: torch.Tensor = self.down(self.kept.pop() * gradient * torch.rand(64))
        return y


class BackwardInside(Block):
    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(WIDTH, 1)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.probe(x.detach()).square().mean().backward()
        return super().inner(x)


class Freezing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.up.weight.requires_grad_(False)
        y = super().forward(x)
        self.up.weight.requires_grad_(True)
        return y


class WithWeightsOutside(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self[at].get_parameter("up.weight") for at in (0, 1))
        x = x @ first.t() @ second
        for block in self:
            x = block(x)
        return x


class OtherDtype(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        y = super().forward(x)
        torch.set_default_dtype(torch.float32)
        return y


class Thread(Block):
    """Another thread draws numpy's numbers meanwhile."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        if self.late:
            thread = threading.Thread(target=np.random.rand)
            thread.start()
            thread.join()
        return super().inner(x)


class Draws(Block):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return super().inner(x * (1 + float(np.random.rand()) if self.late else 1))


class Shortens(Block):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        if self.late and len(self.layers) > 2:
            del self.layers[-1]
        return super().inner(y)


@pytest.mark.parametrize(
    "block", [Residual, GradientInside, BackwardInside, Freezing, OtherDtype, Thread, Draws, Shortens]
)
def test_same_numbers(block: type[Block]) -> None:
    train_alike(block)


@pytest.mark.parametrize(("block", "root"), [(Residual, WritesResults), (Freezing, WithWeightsOutside)])
def test_same_numbers_in_another_root(block: type[Block], root: type[nn.Sequential]) -> None:
    train_alike(block, root=root)


class Dropping(Block):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(super().inner(x), 0.3, train=True)


def test_random_numbers_that_only_the_forward_draws() -> None:
    def forked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            return loss_of(model, x)

    train_alike(Dropping, forward=forked)


class LeavesLosses(Block):
    """In a list from the fifth pass on, and in an object always."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []
        self.out = types.SimpleNamespace(loss=None)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        y = super().inner(x)
        self.losses.clear()
        if self.late:
            self.losses.append(y.square().mean())
        self.out.loss = y.abs().mean()
        return y


def test_losses_that_blocks_leave_behind_keep_their_graphs() -> None:
    def both(model: Any, loss: torch.Tensor) -> None:
        loss.backward(retain_graph=True)
        sum(block.out.loss for block in model).backward(retain_graph=True)
        if model[0].late:
            sum(block.losses[0] for block in model).backward()

    train_alike(LeavesLosses, back=both)


class WithTuple(Block):
    def __init__(self) -> None:
        super().__init__()
        self.held = (torch.ones(1),)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return super().inner(x + self.held[0])


def test_a_tensor_in_a_tuple_that_user_code_writes_to() -> None:
    def write(model: Any, loss: torch.Tensor) -> None:
        if model[0].late:
            model[0].held[0].add_(1)
        loss.backward()

    train_alike(WithTuple, back=write)


class WritesLate(Block):
    """To a buffer, of which an attribute is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(4))
        self.first = self.get_buffer("count")[:1]

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        if self.late:
            self.get_buffer("count").add_(1)
        return super().inner(x * self.first.clone())


class WritesATupleLate(WithTuple):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        if self.late:
            self.held[0].add_(1)
        return Block.inner(self, x * self.held[0].clone())


class GradientInsideLate(GradientInside):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return super().inner(x) if self.late else Block.inner(self, x)


@pytest.mark.parametrize("block", [WritesLate, WritesATupleLate, GradientInsideLate])
def test_what_settled_blocks_begin_to_do_is_an_error(block: type[Block]) -> None:
    with pytest.raises(StaleGraph, match=r"for the first time\. .* set activations=\"offload\""):
        train_alike(block)


class Queue(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(32, WIDTH))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.queue = torch.cat([self.get_buffer("queue")[8:], x.detach()])
        return super().inner(x)


def test_values_that_were_replaced_are_freed() -> None:
    model = nn.Sequential(*(Queue() for _ in range(3)))
    with contextlib.closing(
        storm.offload_activations(model, mode="recompute", vram="64MiB", device="cpu")
    ) as activations:
        for _ in range(PASSES):
            old = [weakref.ref(block.get_buffer("queue")) for block in model]
            with activations:
                loss = loss_of(model, torch.randn(8, WIDTH))
            loss.backward()
            gc.collect()
            assert [reference() for reference in old] == [None] * 3
        del loss
        up: Any = model[0].up
        weight = weakref.ref(up.weight)
        up.weight = nn.Parameter(torch.randn(64, WIDTH))
        gc.collect()
        assert weight() is None
