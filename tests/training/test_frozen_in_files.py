"""`storm train --lora-rank --disk`: the base model's weights remain in its files, and a run has the same losses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from stormtorch.core.errors import OutOfBudget
from stormtorch.memory.disk.mapped import Mappings
from stormtorch.training.model.build import build

from .tiny import Quiet, losses, one_thread, run, settings, with_weights  # noqa: F401  # a fixture

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 8}


def least_ram(folder: Path, **given: Any) -> int:
    with pytest.raises(OutOfBudget) as caught:
        run(settings(folder, **{**given, "ram": "1KiB", "output": str(folder / "none")}))
    found = re.search(r", (\d+) bytes", caught.value.numbers)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("shard", ["5GB", "300KB"])
@pytest.mark.daily("300KB")
def test_adapters_on_a_model_that_ram_has_no_room_for(shard: str, tmp_path: Path) -> None:
    model = with_weights(tmp_path / "model", shard=shard, **SIZES)
    given: dict[str, Any] = {
        "model": str(model),
        "lora_rank": 2,
        "vram": "2MiB",
        "lr": 1e-2,
        "steps": 6,
        "save_every": 3,
    }
    whole = settings(tmp_path, **given, output=str(tmp_path / "whole"))
    assert run(whole) == 0
    ram = least_ram(tmp_path, **given, disk=(str(tmp_path),)) + 32768  # the loop takes some, too
    assert ram < least_ram(tmp_path, **given) // 2
    watcher = Quiet()
    chosen = settings(tmp_path, **given, disk=(str(tmp_path),), ram=str(ram), output=str(tmp_path / "short"))
    assert run(chosen, watcher) == 0
    assert losses(chosen) == losses(whole)
    assert any("mapped from" in line for line in watcher.said)


def test_frozen_weights_are_views_of_the_files(tmp_path: Path) -> None:
    model = with_weights(tmp_path / "model", **SIZES)
    built = build(settings(tmp_path, model=str(model), lora_rank=2, disk=(str(tmp_path),)), values=True)
    mappings = Mappings()
    for parameter in built.model.parameters():
        there = mappings.span(parameter.data_ptr(), parameter.nbytes)
        assert (there is None) == parameter.requires_grad
    assert built.weights is None
    assert built.read_bytes == 0


def test_weights_of_another_dtype_are_read(tmp_path: Path) -> None:
    model = with_weights(tmp_path / "model", dtype=torch.bfloat16, **SIZES)
    chosen = settings(tmp_path, model=str(model), lora_rank=2, disk=(str(tmp_path),), steps=2)
    assert build(chosen, values=True).weights == model
    assert run(chosen) == 0
