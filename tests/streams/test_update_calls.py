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
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    counted = {"calls": 0, "checks": 0}
    submit, check = Worker.submit, AdamTensors.__post_init__

    def counting_submit(*args: Any, **kwargs: Any) -> int:
        counted["calls"] += 1
        return submit(*args, **kwargs)

    def counting_check(tensors: AdamTensors) -> None:
        counted["checks"] += 1
        check(tensors)

    monkeypatch.setattr(Worker, "submit", counting_submit)
    monkeypatch.setattr(AdamTensors, "__post_init__", counting_check)
    session = storm.stream(model, optimizer, vram="1MiB", device="cpu", step="forward")
    units = len(session.units)
    x = torch.randn(4, 32)
    counts = []
    for _ in range(4):
        counted.update(calls=0, checks=0)
        model(x).square().mean().backward()
        if clip:
            session.clip_grad_norm_(1e-3)
        optimizer.step()
        optimizer.zero_grad()
        counts.append((counted["calls"], counted["checks"]))
    session.close()
    assert units >= 1
    assert counts[0] == (2 * units, 2 * units)
    assert counts[1:] == [(2 * units, 0)] * 3
