"""Small models and sessions for the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import stormtorch as storm
from stormtorch.session.api import Session


class Small(nn.Module):
    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 32, bias=False)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = torch.tanh(block(x))
        return torch.as_tensor(self.head(x))


def small(seed: int = 0, **shape: int) -> Small:
    torch.manual_seed(seed)
    return Small(**shape)


def session_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Session:
    return storm.stream(model, optimizer, vram="64MiB", device="cpu")


class Run:
    """A model in training."""

    def __init__(self, seed: int = 0, **shape: int) -> None:
        self.model = small(seed, **shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.session = session_of(self.model, self.optimizer)

    def step(self, number: int = 0) -> float:
        tokens = torch.arange(8).view(1, 8) + number % 8
        loss = self.model(tokens).logsumexp(-1).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def disk_bytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
