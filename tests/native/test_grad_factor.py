"""The factor given by address: the same bits as by value, and read when an update begins, not when it is submitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from stormtorch.native import fallback
from stormtorch.native.adamw import adamw_
from stormtorch.native.library import library
from stormtorch.native.update import AdamStep, AdamTensors
from stormtorch.native.worker.jobs import Worker

from ..drained import drained

MakeTensors = Callable[..., AdamTensors]
OpenAny = Callable[..., Worker]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FACTOR, SCALE = 0.3, 0.7
PRODUCT = float(np.float32(FACTOR) * np.float32(SCALE))


def with_factor(tensors: AdamTensors, factor: float) -> AdamTensors:
    return dataclasses.replace(tensors, grad_factor=torch.tensor(factor))


def assert_same_bits(ours: AdamTensors, theirs: AdamTensors) -> None:
    for name in ("weight", "master", "exp_avg", "exp_avg_sq"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert a is b is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


@pytest.fixture(params=["native", "fallback"])
def _either(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("native" if request.param == "native" else "no_library")


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("maximize", [False, True])
def test_as_by_value(weight: torch.dtype, grad: torch.dtype, maximize: bool, make_tensors: MakeTensors) -> None:
    ours, theirs = with_factor(make_tensors(10_007, weight, grad), FACTOR), make_tensors(10_007, weight, grad)
    adamw_(ours, AdamStep(lr=1e-2, step=3, grad_scale=SCALE, maximize=maximize))
    adamw_(theirs, AdamStep(lr=1e-2, step=3, grad_scale=PRODUCT, maximize=maximize))
    assert_same_bits(ours, theirs)


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("weight", DTYPES)
def test_one_changes_nothing(weight: torch.dtype, make_tensors: MakeTensors) -> None:
    ours, theirs = with_factor(make_tensors(10_007, weight), 1.0), make_tensors(10_007, weight)
    for tensors in (ours, theirs):
        adamw_(tensors, AdamStep(lr=1e-2, step=3, grad_scale=SCALE))
    assert_same_bits(ours, theirs)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("threads", [1, 3])
def test_subnormals_are_not_flushed(threads: int, make_tensors: MakeTensors) -> None:
    """Every thread keeps the specification, and the one that calls keeps the mode it was switched to."""
    count = 32768 * 24 + 1
    ours, theirs = with_factor(make_tensors(count), 2.0**-126), make_tensors(count)
    for tensors in (ours, theirs):
        tensors.exp_avg.zero_()
    adamw_(theirs, AdamStep(lr=1e-2, step=3, grad_scale=2.0**-130))
    assert 0 < float(theirs.exp_avg.abs().max()) < 2.0**-126
    tiny = torch.tensor(2.0**-126)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        flushed = float(tiny * 0.5)
        adamw_(ours, AdamStep(lr=1e-2, step=3, grad_scale=2.0**-4), threads=threads)
        assert float(tiny * 0.5) == flushed
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("weight", DTYPES)
def test_a_worker_reads_it_after_the_ready_flag(
    weight: torch.dtype, open_any: OpenAny, make_tensors: MakeTensors, words: Any
) -> None:
    worker = open_any(threads=2)
    ours, theirs = with_factor(make_tensors(100_003, weight), 55.0), make_tensors(100_003, weight)
    assert ours.grad_factor is not None
    worker.submit(ours, AdamStep(lr=1e-2, step=3, grad_scale=SCALE), ready=words.at(0))
    assert not drained(worker, 0.02)
    ours.grad_factor.fill_(FACTOR)
    words[0] = 1
    assert drained(worker, 20)
    adamw_(theirs, AdamStep(lr=1e-2, step=3, grad_scale=PRODUCT))
    assert_same_bits(ours, theirs)


def test_a_worker_reads_it_once(open_any: OpenAny, make_tensors: MakeTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of many chunks: what is written after the first one began is for the next update."""
    monkeypatch.setattr(fallback, "CHUNK", 1 << 16)
    worker, count = open_any(threads=2), (2 if library() is None else 8) << 20
    ours, theirs = with_factor(make_tensors(count), FACTOR), make_tensors(count)
    assert ours.grad_factor is not None
    worker.submit(ours, AdamStep(lr=1e-2, step=3, grad_scale=SCALE))
    while worker.stats().elements == 0:
        pass
    ours.grad_factor.fill_(55.0)
    assert drained(worker, 60)
    adamw_(theirs, AdamStep(lr=1e-2, step=3, grad_scale=PRODUCT))
    assert_same_bits(ours, theirs)
