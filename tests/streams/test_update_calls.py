"""How much the host does for an update: as few calls as there are settings, and nothing twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stormtorch as storm
from stormtorch.native.update import AdamTensors
from stormtorch.native.worker.jobs import Worker


@pytest.mark.parametrize("clip", [False, True])
def test_a_unit_has_one_call_for_each_group_and_checks_its_tensors_once(
    monkeypatch: pytest.MonkeyPatch, clip: bool
) -> None:
    """Vectors lie between the matrices of a model, and trainers do not decay them."""
    torch.manual_seed(0)

    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))

    model = nn.Sequential(*(block() for _ in range(3)))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    calls: list[Any] = []
    made: list[Any] = []
    submit, check = Worker.submit, AdamTensors.__post_init__
    monkeypatch.setattr(Worker, "submit", lambda *args, **kwargs: (calls.append(1), submit(*args, **kwargs))[1])
    monkeypatch.setattr(AdamTensors, "__post_init__", lambda self: (made.append(1), check(self))[1])
    session = storm.stream(model, optimizer, vram="1MiB", device="cpu", step="forward")
    units = len(session.units)
    x = torch.randn(4, 32)
    counts = []
    for _ in range(4):
        calls.clear()
        made.clear()
        model(x).square().mean().backward()
        if clip:
            session.clip_grad_norm_(1e-3)
        optimizer.step()
        optimizer.zero_grad()
        counts.append((len(calls), len(made)))
    session.close()
    assert units >= 1
    assert counts[0] == (2 * units, 2 * units)
    assert counts[1:] == [(2 * units, 0)] * 3
