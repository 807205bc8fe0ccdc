"""Law: state dicts, written and read by torch itself, resume a run too: the way of everybody who has a loop already."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from .models import (
    CHAIN,
    frozen,
    one_thread,  # noqa: F401  # a fixture
    same,
    stream,
)

MAKERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "adamw": lambda model: optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "sgd": lambda model: optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False),
    "plain sgd": lambda model: optim.SGD(model.parameters(), lr=0.01, foreach=False),
    "adafactor": lambda model: optim.Adafactor(model.parameters(), lr=1e-2, foreach=False),
}


def steps(model: nn.Module, optimizer: optim.Optimizer, start: int, stop: int) -> list[torch.Tensor]:
    losses = []
    for number in range(start, stop):
        loss = CHAIN.loss(model, CHAIN.batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("maker", MAKERS)
def test_resumed_from_state_dicts(maker: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = CHAIN.build().to(dtype)
    optimizer = MAKERS[maker](model)
    with stream(model, optimizer):
        steps(model, optimizer, 0, 3)
        saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        expected = steps(model, optimizer, 3, 6)
        everything = frozen([model.state_dict(), optimizer.state_dict()])
    other = CHAIN.build().to(dtype)
    optimizer = MAKERS[maker](other)
    with stream(other, optimizer):
        steps(other, optimizer, 7, 9)
        other.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        same(steps(other, optimizer, 3, 6), expected, "losses")
        same(frozen([other.state_dict(), optimizer.state_dict()]), everything, "everything")


def test_a_saved_weight_is_no_larger_than_itself() -> None:
    """Although it lies in one piece of memory with all the others, and with other dtypes."""
    model = CHAIN.build().to(torch.bfloat16)
    model.get_submodule("head").float()
    with stream(model):
        file = io.BytesIO()
        torch.save(model.get_parameter("blocks.3.up.weight"), file)
        assert file.tell() < 64 * 32 * 2 + 4096
        same(through_a_file(model.state_dict()), frozen(model.state_dict()), "state dict")
