"""A second storage tells when its last tensor goes, and not before."""

from __future__ import annotations

import gc
from collections import deque
from typing import Any

import torch

from stormtorch.memory.pools.alias import alias


def test_the_last_view_decides(device: torch.device) -> None:
    memory = torch.zeros(4096, dtype=torch.uint8, device=device)
    gone: deque[Any] = deque()
    base, reference = alias(memory, gone)
    view = base.view(torch.float32)[8:24].view(4, 4).t()
    view.fill_(3)
    assert base.data_ptr() == memory.data_ptr()
    assert memory.view(torch.float32)[8:24].eq(3).all()
    del base
    gc.collect()
    assert not gone
    del view
    assert list(gone) == [reference]


def test_autograd_counts_as_a_holder(device: torch.device) -> None:
    memory = torch.ones(64, dtype=torch.uint8, device=device).float().view(torch.uint8)
    gone: deque[Any] = deque()
    base, reference = alias(memory, gone)
    weight = base.view(torch.float32)
    del base
    x = torch.ones(64, device=device, requires_grad=True)
    product = (x * weight).sum()
    del weight
    assert not gone
    product.backward()  # frees what the graph had saved
    assert list(gone) == [reference]


def test_it_can_be_written_in_inference_mode(device: torch.device) -> None:
    with torch.inference_mode():
        base, _ = alias(torch.zeros(512, dtype=torch.uint8, device=device), deque())
    assert not base.is_inference()


def test_the_storage_keeps_the_memory(device: torch.device) -> None:
    base, _ = alias(torch.full((1 << 16,), 7, dtype=torch.uint8, device=device), deque())
    gc.collect()
    torch.zeros(1 << 16, dtype=torch.uint8, device=device)
    assert base.eq(7).all()
