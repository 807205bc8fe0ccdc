"""Where an update runs never changes a result: every share gives the same bits, with delays and poison."""

from __future__ import annotations

import copy
import random
import time

import pytest
import torch
from torch import nn
from torch.nn import functional

from stormtorch.session.api import Session
from stormtorch.streams.optimizer.adam.home import AdamState
from stormtorch.streams.settings import Settings, Trial


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + y


def train(
    model: nn.Module, share: float | None, step: str, *, clip: bool = False, micro: int = 1, kept: int = 0
) -> list[torch.Tensor]:
    chance = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trial = Trial(delay=lambda: time.sleep(chance.choice([0, 0, 0, 1e-3])), poison=True, device_share=share, kept=kept)
    generator = torch.Generator().manual_seed(0)
    losses = []
    vram = 125_000 + (500_000 if kept else 0)
    with Session(model, optimizer, Settings(vram=vram, device="cpu", step=step), trial=trial) as session:
        adam = session._parts.adam
        assert adam is not None
        for _ in range(5):
            for _ in range(micro):
                x = torch.randn(4, 16, generator=generator).to(next(model.parameters()).dtype)
                loss = model(x).float().square().mean()
                loss.backward()
                losses.append(loss.detach())
            if clip:
                session.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert any(home.on_device for home in adam.homes) == bool(share or kept)
        if share and not kept:
            assert max(len(chunks) for chunks in adam.there._chunks) > 2, "nothing passes in chunks"
        kept = min(kept, len(session.units))
        assert sum(home.kept is not None for home in adam.homes) == kept
        assert sum(home.state is AdamState.DEVICE for home in adam.homes) == (kept if step != "serial" else 0)
        states = [tensor for p in model.parameters() for tensor in optimizer.state[p].values()]
        losses += [torch.clone(state) for state in states]
    return losses + [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("step", "clip", "micro"),
    [("forward", False, 1), ("forward", True, 1), ("forward", True, 3), ("backward", False, 1)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_share_gives_the_same_bits(step: str, clip: bool, micro: int, dtype: torch.dtype) -> None:
    model = nn.Sequential(*(Block() for _ in range(6))).to(dtype)
    results = {share: train(copy.deepcopy(model), share, step, clip=clip, micro=micro) for share in (0.0, 0.5, 1.0)}
    for share in (0.5, 1.0):
        for ours, theirs in zip(results[share], results[0.0], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("step", "clip", "micro"),
    [("forward", False, 1), ("forward", True, 1), ("forward", True, 3), ("backward", False, 1), ("serial", False, 1)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_that_are_kept_on_the_device_give_the_same_bits(
    step: str, clip: bool, micro: int, dtype: torch.dtype
) -> None:
    """All of them, or some, with the rest divided between the CPU and the device."""
    model = nn.Sequential(*(Block() for _ in range(6))).to(dtype)
    expected = train(copy.deepcopy(model), 0.0, step, clip=clip, micro=micro)
    for kept, share in ((99, 0.0), (2, 0.0), (2, 0.5)):
        streamed = train(copy.deepcopy(model), share, step, clip=clip, micro=micro, kept=kept)
        for ours, theirs in zip(streamed, expected, strict=True):
            assert torch.equal(ours, theirs)
