"""Which way an update goes by its device. Runs without a GPU: CPU tensors that say they were elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from stormtorch.native import adamw, fallback
from stormtorch.native.adamw import adamw_
from stormtorch.native.library import Scalars
from stormtorch.native.update import AdamStep, AdamTensors

MakeTensors = Callable[..., AdamTensors]
STEP = AdamStep(lr=1e-2, step=2)


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(AdamTensors, "device", torch.device("cuda", 0))
    kernel = adamw._device_update
    kernel.cache_clear()
    yield
    kernel.cache_clear()


def test_torch_operations_without_triton(
    make_tensors: MakeTensors, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "stormtorch.native.device_adamw", raising=False)
    tensors, expected = make_tensors(1000), make_tensors(1000)
    with caplog.at_level(logging.WARNING, logger="stormtorch"):
        adamw_(tensors, STEP)
        adamw_(make_tensors(10), STEP)
    fallback.update_(expected, STEP.scalars, 0, 1000)
    assert torch.equal(tensors.weight, expected.weight)
    assert len(caplog.records) == 1
    assert "triton" in caplog.records[0].message
    assert "using torch operations" in caplog.records[0].message


def test_the_kernel_where_there_is_one(make_tensors: MakeTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[AdamTensors, Scalars]] = []

    def record(tensors: AdamTensors, scalars: Scalars) -> None:
        seen.append((tensors, scalars))

    monkeypatch.setattr(adamw, "_device_update", lambda: record)
    tensors = make_tensors(10)
    adamw_(tensors, STEP)
    assert seen == [(tensors, STEP.scalars)]
