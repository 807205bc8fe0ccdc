"""Law: what a user makes of a gradient, holds of it, puts in its place or hangs on its way is as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from .models import (
    CHAIN,
    Pair,
    Side,
    adamw,
    one_thread,  # noqa: F401  # a fixture
)

FAR = "blocks.6.up.weight"  # a parameter in the middle of what moves


@pytest.fixture(params=[0, 99], ids=["", "kept"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """After two steps; with states and gradients at home, and kept on the device."""
    with Pair(CHAIN, adamw, step="forward", kept=request.param) as made:
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
