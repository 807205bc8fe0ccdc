"""Law: compiled blocks of a streamed model have the compiled plain model's numbers, and Dynamo never sees our code.

It would compile hooks and calls of ours as frames of their own, once for each object, until it warns of its limit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from .models import adamw, frozen, gradients, same, stream

# torch.compile's own, in a plain model too; the second one it hides from users by itself
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
WIDTH, BLOCKS = 32, 10  # Dynamo's limit is 8 forms of a function


class Whole(nn.Module):
    """One graph."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(x + self.down(functional.relu(self.middle(self.up(self.norm(x))))))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Broken(Whole):
    """Its graph ends at an operation that saves tensors, which then runs outside of every graph."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.arange(len(x)) % 2 == 0
        return x + x[chosen].square().sum(0) + x[~chosen].exp().mean(0)


def build(block: type[Whole], backend: str, *, wrapped: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(block() for _ in range(BLOCKS)))
    for index in range(1, BLOCKS + 1):
        if wrapped:
            model[index] = torch.compile(model[index], backend=backend, dynamic=False)  # type: ignore[assignment]
        else:
            model[index].compile(backend=backend, dynamic=False)
    return model


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Any]:
    seen: list[Any] = []
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(6, WIDTH)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        seen.append((frozen(loss), frozen(gradients(model))))
        optimizer.step()
        with torch.no_grad():
            seen.append(frozen(model(x)))
    return [seen, frozen(model.state_dict())]


def graphs() -> int:
    return int(counters["frames"]["total"])


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What torch logs as a warning; Python's warnings are errors anyhow."""
    lines: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Listening(logging.WARNING)
    logging.getLogger("torch").addHandler(handler)
    torch._dynamo.reset()
    counters.clear()
    yield lines
    logging.getLogger("torch").removeHandler(handler)
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("block", [Whole, Broken])
@pytest.mark.parametrize(
    ("backend", "activations", "apart", "wrapped"),
    [
        ("eager", "keep", True, False),
        ("eager", "offload", False, True),
        ("aot_eager", "recompute", False, False),
        pytest.param("aot_eager", "offload", True, True, marks=pytest.mark.wide),
        pytest.param("inductor", "keep", False, False, marks=pytest.mark.wide),
    ],
)
def test_compiled_blocks(
    said: list[str], block: type[Whole], backend: str, activations: str, apart: bool, wrapped: bool
) -> None:
    """``apart``: the budget takes blocks apart, and graphs end where weights come in."""
    make: Callable[[], nn.Sequential] = lambda: build(block, backend, wrapped=wrapped)  # noqa: E731
    plain = make()
    optimizer = adamw(plain)
    expected = [run(plain, optimizer, range(3)), run(plain, optimizer, range(3, 5))]
    needed = graphs()
    torch._dynamo.reset()
    counters.clear()
    model = make()
    optimizer = adamw(model)
    with stream(model, optimizer, vram=60_000 if apart else 140_000, activations=activations, seed=0) as session:
        assert (len(session.units) > BLOCKS + 1) == apart
        found = [run(model, optimizer, range(3))]
        compiled = graphs()
        found.append(run(model, optimizer, range(3, 5)))
        assert graphs() == compiled, "compiled once more after the first steps"
    same(found, expected, f"{block.__name__}, {backend}")
    assert not said
    assert compiled == needed or apart, f"{compiled} frames compiled, {needed} in plain PyTorch"
