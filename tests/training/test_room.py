"""Law: a model that does not fit is refused while it is a description: no weight is made, no text is read."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stormtorch as storm
from stormtorch.core.errors import OutOfBudget, SettingError
from stormtorch.core.sizes import MiB
from stormtorch.training.model import hf_model
from stormtorch.training.run import text_data

from .tiny import one_thread, run, settings, with_weights, write_model  # noqa: F401

transformers = pytest.importorskip("transformers")

EIGHT_BILLION = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def never(*_: object, **__: object) -> Any:
    raise AssertionError("this is too late")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ram": "4GiB"}, r"in 4\.0 GiB of RAM \(104\.\d GiB are needed"),
        ({"vram": "1GiB"}, r"through 1\.0 GiB of device memory"),
        ({"ram": "4GiB", "optimizer": "sgd"}, r"GiB are needed"),
    ],
    ids=["ram", "vram", "sgd"],
)
def test_eight_billion_weights_are_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    model = write_model(tmp_path / "model", **EIGHT_BILLION)
    for owner, name in ((hf_model, "build_random"), (text_data, "prepare")):
        monkeypatch.setattr(owner, name, never)
    chosen = settings(tmp_path, model=str(model), dtype="bf16", **changes)
    before, began_s = resident_bytes(), time.monotonic()
    with pytest.raises((OutOfBudget, SettingError), match=words):
        run(chosen)
    assert resident_bytes() - before < 400 * MiB  # what is imported, and 291 empty modules
    assert time.monotonic() - began_s < 60
    assert not (Path(chosen.output) / "data").exists()


def test_adapters_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.setattr(text_data, "prepare", never)
    model = with_weights(tmp_path / "model")
    with pytest.raises(OutOfBudget, match=r"GRADIENTS .*, OPTIMIZER"):
        run(settings(tmp_path, model=str(model), lora_rank=8, ram="150KiB"))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"ram": "4GiB"}, OutOfBudget),
        ({"vram": "1GiB"}, OutOfBudget),
        ({"step": "backward"}, SettingError),
    ],
    ids=["ram", "vram", "step"],
)
def test_a_model_on_meta_is_refused_before_it_gets_memory(changes: dict[str, Any], error: type[Exception]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16384, 16384, bias=False, dtype=torch.bfloat16) for _ in range(32)))

    class Whole(torch.optim.SGD):
        """One that is not known to update each parameter by itself."""

        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    optimizer = Whole(model.parameters(), lr=0.1)
    before = resident_bytes()
    with pytest.raises(error):
        storm.stream(model, optimizer, device="cpu", **changes)
    assert resident_bytes() - before < 100 * MiB
    assert all(parameter.is_meta for parameter in model.parameters())
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
