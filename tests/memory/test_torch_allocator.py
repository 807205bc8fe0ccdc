"""Torch's allocator: a setting that STORM makes while an object needs it, and limits that the user has set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stormtorch as storm
from stormtorch.core.sizes import GiB, MiB
from stormtorch.memory.books import limits
from stormtorch.memory.cuda import allocator as torch_allocator
from stormtorch.memory.cuda.allocator import expand_segments
from stormtorch.memory.cuda.device_meter import CudaMeter

GPU = torch.device("cuda", 0)


class _Mapping:
    can_map = staticmethod(lambda _device: True)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch is told, the first being what it knew before."""
    told = [""]
    for name in torch_allocator._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch_allocator, "driver", lambda: _Mapping)
    monkeypatch.setattr(torch_allocator, "_set", told.append)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: told[-1], raising=False)
    monkeypatch.setattr(torch_allocator, "_segments", torch_allocator._Segments())
    return told


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="this torch does not tell")
def test_torch_keeps_settings_as_they_were_given() -> None:
    private: Any = torch._C
    before = private._accelerator_getAllocatorSettings()
    torch_allocator._set("expandable_segments:True")
    try:
        assert private._accelerator_getAllocatorSettings() == "expandable_segments:True"
    finally:
        torch_allocator._set(before or "expandable_segments:False")


def test_segments_expand_while_anybody_asks(settings: list[str]) -> None:
    first, second = expand_segments(GPU), expand_segments(GPU)
    first()
    first()  # twice is once
    assert settings == ["", "expandable_segments:True"]
    second()
    assert settings[1:] == ["expandable_segments:True", "expandable_segments:False"]
    expand_segments(GPU)()
    assert len(settings) == 5


@pytest.mark.parametrize("name", torch_allocator._VARIABLES)
def test_who_has_set_the_environment_is_left_alone(
    settings: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    expand_segments(GPU)()
    assert settings == [""]


@pytest.mark.parametrize("given", ["max_split_size_mb:64", "expandable_segments:False"])
def test_who_has_set_something_is_left_alone(settings: list[str], given: str) -> None:
    settings.append(given)
    expand_segments(GPU)()
    assert len(settings) == 2


def test_who_sets_something_meanwhile_is_left_alone(settings: list[str]) -> None:
    end = expand_segments(GPU)
    settings.append("max_split_size_mb:64")
    end()
    assert settings[-1] == "max_split_size_mb:64"


def test_a_setting_that_is_refused_is_asked_for_again(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_settings: str) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(torch_allocator, "_set", refuse)
        with pytest.raises(RuntimeError, match="no"):
            expand_segments(GPU)
    expand_segments(GPU)()
    assert len(settings) == 3


def test_an_error_of_earlier_work_leaves_the_setting_as_it_should_be(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "empty_cache", fail)
        with pytest.raises(RuntimeError, match="illegal"):
            expand_segments(GPU)
    assert settings[-1] == "expandable_segments:False"
    end = expand_segments(GPU)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "empty_cache", fail)
        with pytest.raises(RuntimeError, match="illegal"):
            end()
    assert settings[-1] == "expandable_segments:False"
    expand_segments(GPU)()
    assert settings[-2:] == ["expandable_segments:True", "expandable_segments:False"]


def test_other_devices_and_allocators_are_left_alone(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    expand_segments(torch.device("cpu"))()
    monkeypatch.setattr(_Mapping, "can_map", staticmethod(lambda _device: False))
    expand_segments(GPU)()
    monkeypatch.setattr(_Mapping, "can_map", staticmethod(lambda _device: True))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    expand_segments(GPU)()
    assert settings == [""]


@pytest.mark.parametrize(("fraction", "free", "total"), [(1.0, 14, 24), (0.5, 5, 12), (0.25, 2, 6)])
def test_a_fraction_that_the_user_has_set_is_all_there_is(
    fraction: float, free: int, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 GiB, of which others have 3; torch has 9, two of them cached."""
    known: dict[str, Any] = {
        "mem_get_info": (12 * GiB, 24 * GiB),
        "memory_reserved": 9 * GiB,
        "memory_allocated": 7 * GiB,
        "get_per_process_memory_fraction": fraction,
    }
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda _device, value=value: value)
    assert limits.device_memory_bytes(GPU) == (free * GiB, total * GiB)


@pytest.mark.parametrize(
    ("limit", "lost"), [(4, 0), (12, 0), (13, 1024 + 128), (14, 1024 + 768 + 512), (16, 2048 + 2560)], ids=str
)
def test_what_is_lost_of_a_budget(limit: int, lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 13.5 GiB, of which torch has taken 9 and has had 7 allocated: 2 are lost, or an eighth of the budget,
    less what there is beyond it, or with what is missing."""
    known: dict[str, Any] = {
        "mem_get_info": (int(4.5 * GiB), 24 * GiB),
        "memory_reserved": 9 * GiB,
        "max_memory_reserved": 9 * GiB,
        "get_per_process_memory_fraction": 1.0,
    }
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda _device, value=value: value)
    assert torch_allocator.lost_bytes(GPU, limit * GiB, most_allocated=7 * GiB) == lost * MiB


@pytest.mark.parametrize(("least", "lost"), [(0, 256), (128, 256), (512, 512), (4096, 1024)])
def test_what_is_lost_where_nothing_was_seen(least: int, lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a budget that is all that the user lets torch take."""
    known: dict[str, Any] = {
        "mem_get_info": (100 * GiB, 128 * GiB),
        "memory_reserved": GiB,
        "max_memory_reserved": GiB,
        "get_per_process_memory_fraction": 1 / 16,
    }
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda _device, value=value: value)
    assert torch_allocator.lost_bytes(GPU, 8 * GiB, most_allocated=GiB, least_bytes=least * MiB) == lost * MiB


def test_a_peak_that_the_user_resets_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {
        "mem_get_info": (0, 8 * GiB),
        "memory_reserved": 8 * GiB,
        "max_memory_reserved": 8 * GiB,
        "max_memory_allocated": int(7.5 * GiB),
        "get_per_process_memory_fraction": 1.0,
    }
    for name, answer in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda _device, answer=answer: answer)
    meter = CudaMeter(GPU)
    assert meter.peak() == int(7.5 * GiB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: GiB)
    assert meter.lost(8 * GiB) == 512 * MiB


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return result


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 8192])
def test_cuda_a_budget_that_is_all_there_is(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.2 GiB of weights and 3.6 of states within 2 GiB, beyond which torch refuses."""
    for name in torch_allocator._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    limit = 2 * GiB
    torch.cuda.empty_cache()
    allowed = limit + torch.cuda.memory_reserved(GPU)
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info(GPU)[1], GPU)
    try:
        model = nn.Sequential(*(_Layer(1536) for _ in range(17)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        with storm.stream(model, optimizer, vram=limit, device=GPU) as session:
            x = torch.randn(rows, 1536, device=GPU)
            for _ in range(8):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            session.synchronize()
            segments = torch.cuda.memory_snapshot()
            assert any(segment["is_expandable"] and segment["total_size"] >= 64 * MiB for segment in segments)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)


@pytest.mark.gpu
def test_cuda_what_a_session_had_goes_back_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch does not use memory of segments that expand once that is not the setting any more."""
    for name in torch_allocator._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(GPU)
    model = nn.Sequential(*(_Layer(1024) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with storm.stream(model, optimizer, vram=GiB, device=GPU):
        for _ in range(5):
            model(torch.randn(256, 1024, device=GPU)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.cuda.memory_reserved(GPU) > before + 128 * MiB
    cached = [s["total_size"] - s["allocated_size"] for s in torch.cuda.memory_snapshot() if s["is_expandable"]]
    assert sum(cached) < 32 * MiB, cached  # what cuBLAS works in has come to stay
