"""Law: the device never holds more than ``vram`` allows, however far the host runs ahead."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import stormtorch as storm
from stormtorch.core.sizes import MiB
from stormtorch.core.tags import Tag, Tier

from .models import (
    CHAIN,
    LLAMA,
    OTHERS,
    RECOMPUTED,
    Case,
    Llama,
    adamw,
    on,
    one_thread,  # noqa: F401  # a fixture
    parameter_bytes,
    stream,
    tight,
    tokens,
    train,
)


@pytest.mark.parametrize("step", ["serial", "forward", "backward"])
@pytest.mark.parametrize("case", [LLAMA, RECOMPUTED, CHAIN, *OTHERS], ids=lambda case: case.name)
def test_the_ledger_never_exceeds_vram(device: torch.device, case: Case, step: str) -> None:
    model = case.build()
    budget = tight(model)
    optimizer = adamw(model)
    with stream(model, optimizer, vram=budget, device=device, step=step, seed=0) as session:
        train(case, model, optimizer, steps=3, device=device)
        session.ledger.check()
        assert session.ledger.budgets[Tier.DEVICE].limit_bytes == budget
        assert 0 < session.ledger.peak_bytes(Tier.DEVICE) <= budget
        held = {line.tag: line.peak_bytes for line in session.ledger.balances() if line.tier is Tier.DEVICE}
        if case.name != "bare":
            assert held[Tag.PARAMETERS] < parameter_bytes(model), "all of it was there: nothing was streamed"


@pytest.mark.parametrize("share", [1.0, 1.5, 3.0])
def test_more_vram_is_used_and_never_exceeded(share: float) -> None:
    model = LLAMA.build()
    budget = int(tight(model) * share)
    optimizer = adamw(model, fused=True)
    with stream(model, optimizer, vram=budget) as session:
        train(LLAMA, model, optimizer, steps=3)
        assert session.ledger.peak_bytes(Tier.DEVICE) <= budget


def test_many_forwards_that_nobody_finishes() -> None:
    """Graphs that are kept hold no weights on the device."""
    model = LLAMA.build()
    optimizer = adamw(model, fused=True)
    with stream(model, optimizer, seed=0) as session:
        losses = [LLAMA.loss(model, LLAMA.batch(step)) for step in range(8)]
        assert session.ledger.peak_bytes(Tier.DEVICE) <= tight(model)
        for loss in losses:
            loss.backward()
        optimizer.step()
        assert session.ledger.peak_bytes(Tier.DEVICE) <= tight(model)


class _Product(nn.Module):
    """Two layers that are units of their own in a small budget, and are never called."""

    def __init__(self, width: int, *, views: bool) -> None:
        super().__init__()
        self.down, self.up = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.views = views

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = self.up.weight, self.down.weight
        if self.views:
            up, down = up.reshape(-1, 4, 64).transpose(0, 1), down.reshape(4, -1, 64).transpose(1, 2)
            x = x.view(4, -1, 64)
        return torch.as_tensor(x + x @ (up.transpose(-1, -2) @ down.transpose(-1, -2)).tanh()).flatten(0, -2)


@pytest.mark.parametrize("views", [False, True])
def test_weights_that_user_code_multiplies_with_each_other(device: torch.device, views: bool) -> None:
    """They are on the device at once, and autograd keeps neither of them there, nor views of them."""
    found = []
    for streamed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(_Product(64, views=views) for _ in range(12)))
        if not streamed:
            model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with stream(model, optimizer, vram=6 * 64 * 64 * 4, device=device, seed=0) if streamed else nullcontext():
            for number in range(3):
                x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number)).to(device)
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        found.append((losses, [parameter.detach().cpu() for parameter in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(*pair) for pair in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("step", ["forward", "backward"])
def test_what_cuda_allocates_stays_within_vram(step: str) -> None:
    """The whole of it, activations too: 250 MiB of weights, and as much again of gradients, in 128 MiB."""
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    model = Llama(blocks=24, width=512, recompute=True)
    assert parameter_bytes(model) > 240 * MiB
    optimizer = adamw(model)
    warm = torch.randn(512, 512, device=device, requires_grad=True)
    (warm @ warm).sum().backward()  # cuBLAS keeps a workspace for good
    del warm
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    baseline = torch.cuda.memory_allocated()
    with storm.stream(model, optimizer, vram="128MiB", device=str(device), step=step) as session:
        for number in range(6):  # nothing is read: the host runs ahead
            LLAMA.loss(model, on(tokens(number), device)).backward()
            if step == "forward":
                session.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - baseline <= 128 * MiB
        assert session.ledger.peak_bytes(Tier.DEVICE) <= 128 * MiB
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= baseline + MiB
