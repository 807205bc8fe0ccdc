"""Law: gradients of second order (MAML) are plain PyTorch's, bit for bit with a backward for each task.

A parameter that user code computes with itself (``p - lr * g``) gets that part of its gradient from torch, the rest
from the streams. With one backward over several tasks each side adds up its own parts first: within rounding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from .models import adamw, frozen, same, stream

ROUNDING = 2.0**-23  # of fp32: the sums of both sides may be off by half of it for each part


def task(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(number)
    return torch.randn(6, 24), torch.randn(6, 8)


def maml(model: nn.Module, tasks: range, *, at_once: bool) -> list[torch.Tensor]:
    """The gradients after a step of SGD inside of each task; ``at_once``: one backward for all of them."""
    model.zero_grad()
    losses = []
    for number in tasks:
        x, y = task(number)
        names = dict(model.named_parameters())
        inner = (model(x) - y).square().mean()
        grads = torch.autograd.grad(inner, list(names.values()), create_graph=True)
        fast = {name: p - 0.1 * grad for (name, p), grad in zip(names.items(), grads, strict=True)}
        losses.append((functional_call(model, fast, (x,)) - y).square().mean())
        if not at_once:
            losses.pop().backward()
    if at_once:
        torch.stack(losses).sum().backward()
    return [frozen(p.grad) for p in model.parameters()]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("vram", ["tight", "1GiB"])
def test_second_order_over_tasks(at_once: bool, vram: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 8))
    model = copy.deepcopy(plain)
    with stream(model, adamw(model), vram=vram, seed=0):
        size = [torch.zeros(()) for _ in plain.parameters()]
        for count in range(1, 5):
            own = maml(plain, range(count - 1, count), at_once=at_once)
            same(maml(model, range(count - 1, count), at_once=at_once), own, "one task")
            size = [before + grad.abs().max() for before, grad in zip(size, own, strict=True)]
            expected = maml(plain, range(count), at_once=at_once)
            found = maml(model, range(count), at_once=at_once)
            if not at_once:
                same(found, expected, f"{count} tasks")
            for ours, theirs, most in zip(found, expected, size, strict=True):
                assert (ours - theirs).abs().max() <= ROUNDING * most


def test_a_regulariser_beside_the_model() -> None:
    """Over the parameters themselves, with accumulation."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8))
    model = copy.deepcopy(plain)
    sides = [(plain, adamw(plain)), (model, adamw(model))]
    with stream(model, sides[1][1], vram="tight", seed=0):
        for step in range(3):
            found = []
            for side, optimizer in sides:
                for number in range(3 * step, 3 * step + 3):
                    x, y = task(number)
                    loss = (side(x) - y).square().mean() + 0.1 * sum(p.square().sum() for p in side.parameters())
                    loss.backward()
                found.append([frozen(p.grad) for p in side.parameters()])
                optimizer.step()
                optimizer.zero_grad()
            same(found[1], found[0], f"gradients of step {step}")
        same(frozen(model.state_dict()), frozen(plain.state_dict()), "weights")
