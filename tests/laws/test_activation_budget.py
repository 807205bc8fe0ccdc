"""``vram`` holds for activations too, from the first pass on: what block checkpointing needs is enough for every mode.

Gradients are on the device here, so that the room shrinks while backward runs; and with accumulation they are there
from the second pass on, when nothing has been planned yet."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stormtorch as storm
from stormtorch.core.sizes import GiB

pytestmark = pytest.mark.gpu

STEPS = 10


class Half(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.narrow(torch.sigmoid(torch.tanh(self.wide(x))))
        return out


class Halves(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Half(width), Half(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        out: torch.Tensor = x + self.second(x)
        return out


def run(model: nn.Module, loss_of: Callable[[], torch.Tensor], accumulate: int) -> int:
    """A step with its gradients; the peak, which is reset before as users do."""
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(accumulate):
        loss_of().backward()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mode", ["auto", "recompute"])
def test_peak_is_within_vram(mode: str, accumulate: int) -> None:
    device, width, rows = torch.device("cuda", 0), 1024, 8192
    torch.manual_seed(0)
    model = nn.Sequential(*(Halves(width) for _ in range(12))).to(device)
    x = torch.randn(rows, width, device=device)

    def checkpointed() -> torch.Tensor:
        y = x
        for block in model:
            out = checkpoint(block, y, use_reentrant=False)
            assert isinstance(out, torch.Tensor)
            y = out
        return y.square().mean()

    run(model, checkpointed, accumulate)  # cuBLAS takes its workspace
    limit = run(model, checkpointed, accumulate)
    expected = [copy.deepcopy(parameter.grad).cpu() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    tops = []
    activations = storm.offload_activations(model, mode=mode, vram=limit)

    def arranged() -> torch.Tensor:
        with activations:
            loss: torch.Tensor = model(x).square().mean()
        return loss

    for step in range(STEPS):
        tops.append(run(model, arranged, accumulate))
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad.cpu(), gradient), f"step {step}"
    reason = activations.report().reason
    activations.close()
    shown = ", ".join(f"{top / GiB:.2f}" for top in tops)
    assert max(tops) <= limit * 1.01, f"{shown} GiB of {limit / GiB:.2f}; {reason}"
