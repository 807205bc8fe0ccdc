"""A second storage tells when its last tensor goes, and not before."""

from __future__ import annotations

import gc

import torch

from stormtorch.memory.alias import alias


def test_the_last_view_decides(device: torch.device) -> None:
    memory = torch.zeros(4096, dtype=torch.uint8, device=device)
    gone: list[bool] = []
    base = alias(memory, lambda: gone.append(True))
    view = base.view(torch.float32)[8:24].view(4, 4).t()
    view.fill_(3)
    assert base.data_ptr() == memory.data_ptr()
    assert memory.view(torch.float32)[8:24].eq(3).all()
    del base
    gc.collect()
    assert not gone
    del view
    assert gone == [True]


def test_autograd_counts_as_a_holder(device: torch.device) -> None:
    memory = torch.ones(64, dtype=torch.uint8, device=device).float().view(torch.uint8)
    gone: list[bool] = []
    weight = alias(memory, lambda: gone.append(True)).view(torch.float32)
    x = torch.ones(64, device=device, requires_grad=True)
    product = (x * weight).sum()
    del weight
    assert not gone
    product.backward()  # frees what the graph had saved
    assert gone == [True]


def test_it_can_be_written_in_inference_mode(device: torch.device) -> None:
    with torch.inference_mode():
        base = alias(torch.zeros(512, dtype=torch.uint8, device=device), lambda: None)
    assert not base.is_inference()
