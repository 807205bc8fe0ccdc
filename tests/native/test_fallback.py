"""The torch fallback: the native update within one rounding, chosen when there is no library."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from stormtorch.native import fallback
from stormtorch.native.adamw import adamw_
from stormtorch.native.split import join
from stormtorch.native.update import AdamStep, AdamTensors
from stormtorch.native.worker.jobs import Worker

from ..drained import drained

MakeTensors = Callable[..., AdamTensors]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def results(tensors: AdamTensors) -> list[torch.Tensor]:
    weight, master = tensors.weight, tensors.master
    if weight.dtype == torch.bfloat16:
        assert master is not None
        return [join(weight, master), tensors.exp_avg, tensors.exp_avg_sq]
    return [weight if master is None else master, tensors.exp_avg, tensors.exp_avg_sq]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, {"decoupled": False}, {"betas": (0.3, 0.9), "maximize": True}, {"fused": False}]
)
def test_within_one_rounding_of_native(
    weight: torch.dtype,
    grad: torch.dtype,
    options: dict[str, object],
    make_tensors: MakeTensors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fallback, "CHUNK", 1000)
    native, plain = make_tensors(10_007, weight, grad), make_tensors(10_007, weight, grad)
    step = AdamStep(lr=1e-2, step=5, grad_scale=0.7, **options)  # type: ignore[arg-type]
    before = [tensor.clone() for tensor in results(native)]
    adamw_(native, step)
    fallback.update_(plain, step.scalars, 0, plain.numel)
    for old, ours, theirs in zip(before, results(native), results(plain), strict=True):
        # In units of the largest term: where a sum cancels, one rounding of a term is many of the small result.
        distance = (ours - theirs).abs() / torch.maximum(torch.maximum(old.abs(), ours.abs()), (ours - old).abs())
        assert float(distance.nan_to_num().max()) <= 2**-23
        assert int(distance.count_nonzero()) <= 3, "one rounding is rare; this is another formula"
    assert torch.equal(native.weight.isnan(), plain.weight.isnan())
    if weight == torch.float16:
        assert plain.master is not None
        assert torch.equal(plain.weight, plain.master.half())


def test_only_the_given_range_is_updated(make_tensors: MakeTensors) -> None:
    tensors, before = make_tensors(1000, torch.bfloat16), make_tensors(1000, torch.bfloat16)
    fallback.update_(tensors, AdamStep(lr=0.1, step=1).scalars, 100, 900)
    for after, old in zip(results(tensors), results(before), strict=True):
        changed = (after != old).nonzero().flatten()
        assert int(changed.min()) == 100
        assert int(changed.max()) == 899


@pytest.mark.usefixtures("no_library")
def test_adamw_uses_it_without_a_library_and_says_so(
    make_tensors: MakeTensors, caplog: pytest.LogCaptureFixture
) -> None:
    tensors, expected = make_tensors(5000), make_tensors(5000)
    step = AdamStep(lr=1e-2, step=2)
    with caplog.at_level(logging.WARNING, logger="stormtorch"):
        adamw_(tensors, step)
        adamw_(make_tensors(10), step)
    fallback.update_(expected, step.scalars, 0, 5000)
    assert torch.equal(tensors.weight, expected.weight)
    assert [record.message for record in caplog.records] == [
        "native kernels: not in use (hidden by a test); using the torch fallback, about 6 times slower"
    ]


@pytest.mark.usefixtures("no_library")
def test_close_to_torch_without_a_library() -> None:
    weight = torch.nn.Parameter(torch.linspace(-2, 2, 999))
    ours, m, v = weight.detach().clone(), torch.zeros(999), torch.zeros(999)
    optimizer = torch.optim.AdamW([weight], lr=1e-2)
    for number in range(1, 11):
        weight.grad = torch.sin(torch.arange(999.0) * number)
        adamw_(AdamTensors(weight=ours, exp_avg=m, exp_avg_sq=v, grad=weight.grad), AdamStep(lr=1e-2, step=number))
        optimizer.step()
    torch.testing.assert_close(ours, weight.data, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weight", DTYPES)
def test_modes_of_the_caller_have_no_effect(
    weight: torch.dtype, make_tensors: MakeTensors, open_any: Callable[..., Worker]
) -> None:
    """Tensors made under inference mode may be changed under it only, and a worker's thread is never under it."""
    step, worker = AdamStep(lr=1e-2, step=2), open_any()
    expected = make_tensors(1000, weight)
    adamw_(expected, step)
    outside = [make_tensors(1000, weight) for _ in range(2)]
    outside[0].weight.requires_grad_()
    with torch.inference_mode():
        inside = [make_tensors(1000, weight) for _ in range(2)]
    adamw_(inside[0], step)
    worker.submit(inside[1], step)
    torch.set_default_device("meta")
    try:
        with torch.inference_mode():
            adamw_(outside[0], step)
            worker.submit(outside[1], step)
            assert drained(worker, 20)
    finally:
        torch.set_default_device(None)
    for tensors in outside + inside:
        assert torch.equal(tensors.weight, expected.weight)
