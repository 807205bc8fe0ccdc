"""User code calls a part of the model that holds its blocks, as ``model.model(...)`` before a loss of its own: that is
one pass, in which blocks are arranged as in a call of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stormtorch as storm

from .models import one_thread  # noqa: F401  # a fixture


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class _Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.layers = nn.ModuleList(_Block(16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = _Body(), nn.Linear(16, 8)
        self.tail = nn.Sequential(*(_Block(8) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tail(self.head(self.body(x)))
        return out


def _whole(model: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x)
    return out


def _inner(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss of the user's own, as `storm.linear_cross_entropy` is used."""
    return torch.nn.functional.linear(model.body(x), model.head.weight, model.head.bias)


def _parts(model: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model.tail(model.head(model.body(x)))
    return out


def _trained(call: Any, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    torch.manual_seed(0)
    model = _Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    session = storm.stream(model, optimizer, device="cpu", vram="1MiB", **settings) if settings else None
    losses, generator = [], torch.Generator().manual_seed(1)
    for _ in range(6):
        loss = call(model, torch.randn(8, 16, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    report = session.report() if session is not None else None
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if session is not None:
        session.close()
    return losses, state, report


@pytest.mark.parametrize("call", [_whole, _inner, _parts])
@pytest.mark.parametrize("activations", ["auto", "recompute", "offload"])
def test_a_call_of_a_part_trains_like_plain(call: Any, activations: str) -> None:
    losses, state, _ = _trained(call)
    streamed, streamed_state, _ = _trained(call, activations=activations)
    assert streamed == losses
    assert all(torch.equal(streamed_state[name], value) for name, value in state.items())


def test_blocks_of_a_part_are_recomputed() -> None:
    _, _, report = _trained(_inner, activations="recompute")
    assert report.plan.activations.reason == "recomputed; the inputs of 4 of 4 blocks stay on the device"


def test_a_part_is_one_pass() -> None:
    """Not one for each block, which would be a session that does not know what comes next."""
    _, _, report = _trained(_inner, activations="recompute")
    _, _, whole = _trained(_whole, activations="recompute")
    assert report.loads <= whole.loads


class _Loops(nn.Module):
    """Calls itself, and uses its own weight after that call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.eye(8) / 2), nn.Linear(8, 8)
        self.kinds: set[type] = set()  # of its weight, as it was seen after the inner call

    def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
        hidden = torch.tanh(x @ self.weight)
        if times:
            hidden = hidden + self(hidden, times - 1)
        self.kinds.add(type(self.weight))
        out: torch.Tensor = self.inner(hidden) @ self.weight
        return out


def test_a_module_that_calls_itself_and_has_two_parents() -> None:
    def train(*, streamed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        loops = _Loops()
        model = nn.Sequential(loops, nn.Sequential(loops, nn.Linear(8, 8)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        session = storm.stream(model, optimizer, vram="1MiB", device="cpu") if streamed else None
        for _ in range(3):
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if session is not None:
            session.close()
        assert loops.kinds == {torch.Tensor if streamed else nn.Parameter}, "the device view was gone"
        return [parameter.detach() for parameter in model.parameters()]

    for expected, found in zip(train(streamed=False), train(streamed=True), strict=True):
        assert torch.equal(expected, found)
