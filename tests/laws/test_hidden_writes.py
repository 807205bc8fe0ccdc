"""A forward that writes its own weights through ``.data`` is refused: the write is lost with the copy on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stormtorch as storm
from stormtorch.core.errors import StormError

from .models import one_thread  # noqa: F401  # a fixture

LOST = r"The forward of a \w+ has changed its parameters on the device"


class _Clipped(nn.Module):
    """Clips its weight from a certain call on."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.inner, self.after, self.calls = nn.Linear(16, 16), after, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > self.after:
            self.inner.weight.data.clamp_(-0.01, 0.01)
        out: torch.Tensor = x + torch.tanh(self.inner(x))
        return out


def model(after: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(_Clipped(after if number == 3 else 10**9) for number in range(6)))


def train(streamed: Any, count: int, device: torch.device, optimizer: Any = None) -> None:
    for _ in range(count):
        loss = streamed(torch.ones(2, 16, device=device)).square().mean()
        if torch.is_grad_enabled():
            loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def refused(streamed: Any, count: int, device: torch.device, optimizer: Any = None) -> None:
    with pytest.raises(StormError, match=LOST):
        train(streamed, count, device, optimizer)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_the_first_call_raises(device: torch.device, activations: str) -> None:
    streamed = model(after=0)
    with storm.stream(streamed, device=device, vram="16MiB", activations=activations):
        refused(streamed, 1, device)


def test_a_call_without_gradients_raises_too(device: torch.device) -> None:
    streamed = model(after=0)
    with storm.stream(streamed, device=device, vram="16MiB"), torch.no_grad():
        refused(streamed, 1, device)


def test_one_that_begins_later_is_noticed(device: torch.device) -> None:
    streamed = model(after=5)
    optimizer = torch.optim.AdamW(streamed.parameters(), lr=0.1)
    with storm.stream(streamed, optimizer, device=device, vram="16MiB", activations="keep"):
        refused(streamed, 5 + 2 * 6, device, optimizer)  # each of six entries has its turn


def test_hooks_are_watched(device: torch.device) -> None:
    streamed = model(after=10**9)

    def clip(module: Any, _args: Any) -> None:
        module.inner.weight.data.clamp_(-0.01, 0.01)

    streamed[2].register_forward_pre_hook(clip)
    with storm.stream(streamed, device=device, vram="16MiB"):
        refused(streamed, 1, device)


def test_a_module_that_is_left_may_write(device: torch.device) -> None:
    streamed = model(after=0)
    with storm.stream(streamed, device=device, vram="16MiB", leave=["3"]):
        train(streamed, 4, device)


def test_reading_data_is_fine(device: torch.device) -> None:
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.weight.data.abs().mean()

    streamed = nn.Sequential(*(Reads(16, 16) for _ in range(4)))
    optimizer = torch.optim.AdamW(streamed.parameters())
    with storm.stream(streamed, optimizer, device=device, vram="16MiB"):
        train(streamed, 12, device, optimizer)


def test_the_session_goes_on_after_it(device: torch.device) -> None:
    streamed = model(after=0)
    with storm.stream(streamed, device=device, vram="16MiB", activations="keep"):
        refused(streamed, 1, device)
        streamed.get_submodule("3").after = 10**9  # type: ignore[assignment]
        train(streamed, 8, device)
