"""What is refused, and what the refusal says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stormtorch.core.errors import SettingError
from stormtorch.native.adamw import adamw_
from stormtorch.native.library import Library
from stormtorch.native.update import AdamStep, AdamTensors
from stormtorch.native.worker.jobs import FlagValue, Worker
from stormtorch.native.worker.open import open_worker

MakeTensors = Callable[..., AdamTensors]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": torch.zeros(9)}, r"exp_avg is float32\[8\]"),
        ({"grad": torch.zeros(16)[::2]}, r"grad is float32\[8\] on cpu, not contiguous"),
        ({"exp_avg": torch.zeros(8, dtype=torch.bfloat16)}, r"exp_avg is bfloat16\[8\]"),
        ({"grad": torch.zeros(8, dtype=torch.float64)}, r"grad is float64\[8\]"),
        ({"grad": torch.zeros(8, device="meta")}, "on meta"),
        ({"master": torch.zeros(8, dtype=torch.int16)}, r"master is int16\[8\]"),
        ({"weight": torch.zeros(8, dtype=torch.bfloat16)}, r"weight is bfloat16\[8\]"),
        ({"weight": torch.zeros(8, dtype=torch.float16), "master": torch.zeros(8, dtype=torch.int16)}, "float16"),
        ({"grad_factor": torch.ones(2)}, r"grad_factor is float32\[2\]"),
        ({"grad_factor": torch.ones(1, dtype=torch.float64)}, r"grad_factor is float64\[1\]"),
        ({"grad_factor": torch.ones((), device="meta")}, r"grad_factor is float32\[1\] on meta"),
    ],
)
def test_tensors_that_do_not_fit(changed: dict[str, torch.Tensor], message: str) -> None:
    good = {name: torch.zeros(8) for name in ("weight", "exp_avg", "exp_avg_sq", "grad")}
    AdamTensors(**good)
    with pytest.raises(SettingError, match=rf"{message}.*Accepted: contiguous tensors of one size"):
        AdamTensors(**good | changed)


def test_tensors_that_share_memory() -> None:
    block = torch.zeros(20)
    with pytest.raises(SettingError, match="exp_avg and grad share memory"):
        AdamTensors(weight=torch.zeros(8), exp_avg=block[:8], exp_avg_sq=torch.zeros(8), grad=block[7:15])
    good = {name: torch.zeros(8) for name in ("weight", "exp_avg", "exp_avg_sq", "grad")}
    with pytest.raises(SettingError, match="weight and grad_factor share memory"):
        AdamTensors(**good, grad_factor=good["weight"][3])


@pytest.mark.parametrize(
    "bad", [{"lr": -1.0}, {"step": 0}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": float("nan")}]
)
def test_numbers_that_cannot_be_meant(bad: dict[str, object]) -> None:
    with pytest.raises(SettingError, match=f"{next(iter(bad))}=.*Accepted"):
        AdamStep(**{"lr": 1e-3, "step": 1} | bad)  # type: ignore[arg-type]


def test_numbers_of_threads(make_tensors: MakeTensors) -> None:
    with pytest.raises(SettingError, match="threads=0"):
        adamw_(make_tensors(1), AdamStep(lr=1e-3, step=1), threads=0)
    with pytest.raises(SettingError, match="threads=-1"):
        open_worker(threads=-1)


def test_unknown_instruction_set(native: Library, make_tensors: MakeTensors) -> None:
    with pytest.raises(SettingError, match=f"Accepted: .*{native.isa}"):
        adamw_(make_tensors(1), AdamStep(lr=1e-3, step=1), isa="mmx")


def test_what_is_missing_sparse_negated_or_misaligned_is_refused() -> None:
    good = {name: torch.ones(8) for name in ("weight", "exp_avg", "exp_avg_sq", "grad")}
    bad = {
        "missing": None,
        "sparse": torch.ones(8).to_sparse(),
        "negated": torch._neg_view(torch.ones(8)),
        "misaligned": torch.frombuffer(bytearray(40), dtype=torch.float32, count=8, offset=1),
    }
    for tensor in bad.values():
        with pytest.raises(SettingError, match="Cannot update these tensors"):
            AdamTensors(**{**good, "grad": tensor})  # type: ignore[arg-type]


@pytest.mark.parametrize("address", [0, -4, 6])
def test_a_flag_must_have_the_address_of_a_word(address: int) -> None:
    with pytest.raises(SettingError, match="32-bit word"):
        FlagValue(address, 1)


def test_a_worker_takes_cpu_tensors_only(
    open_any: Callable[..., Worker], make_tensors: MakeTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, tensors = open_any(threads=1), make_tensors(8)
    monkeypatch.setattr(AdamTensors, "device", torch.device("cuda", 3))
    with pytest.raises(SettingError, match=r"cannot update tensors on cuda:3\. Accepted: CPU tensors"):
        worker.submit(tensors, AdamStep(lr=0.1, step=1))
    assert worker.stats().pending == 0


def test_a_priority_must_fit(open_any: Callable[..., Worker], make_tensors: Callable[..., AdamTensors]) -> None:
    worker = open_any(threads=1)
    for priority in (1 << 31, "high"):
        with pytest.raises(SettingError, match="priority="):
            worker.submit(make_tensors(8), AdamStep(lr=0.1, step=1), priority=priority)  # type: ignore[arg-type]
