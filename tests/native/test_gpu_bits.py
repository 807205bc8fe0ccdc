"""The GPU's kernel, written from csrc/adamw.h, gives the C kernel's bits: an element may be updated on either side."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stormtorch.core.errors import SettingError
from stormtorch.native import adamw, update
from stormtorch.native.adamw import adamw_
from stormtorch.native.split import join
from stormtorch.native.update import AdamStep, AdamTensors
from stormtorch.native.worker.jobs import Worker

MakeTensors = Callable[..., AdamTensors]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RESULTS = ("weight", "master", "exp_avg", "exp_avg_sq")
OPTIONS: list[dict[str, object]] = [
    {},
    {"decoupled": False},
    {"betas": (0.25, 0.9), "maximize": True},
    {"betas": (0.25, 0.9), "decoupled": False, "fused": False},
]


@pytest.fixture
def _kernel(native: object) -> None:  # noqa: ARG001  the bits to compare with are the C kernel's
    pytest.importorskip("triton")


def on_gpu(tensors: AdamTensors) -> AdamTensors:
    given = [field.name for field in dataclasses.fields(tensors) if field.init]
    named: dict[str, torch.Tensor | None] = {name: getattr(tensors, name) for name in given}
    moved: dict[str, Any] = {name: None if tensor is None else tensor.cuda() for name, tensor in named.items()}
    return AdamTensors(**moved)


def assert_same_bits(host: AdamTensors, device: AdamTensors, when: object = "") -> None:
    for name in RESULTS:
        ours, theirs = getattr(host, name), getattr(device, name)
        if ours is not None:
            kind = torch.int16 if ours.itemsize == 2 else torch.int32
            differing = int((ours.view(kind) != theirs.cpu().view(kind)).sum())
            assert differing == 0, f"{differing} elements of {name} differ {when}"


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("fusion", [0, 4])
def test_same_bits_on_the_gpu(
    fusion: int,
    weight: torch.dtype,
    grad: torch.dtype,
    options: dict[str, object],
    make_tensors: MakeTensors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(update, "_FUSION", fusion)
    host = make_tensors(100_003, weight, grad)
    device = on_gpu(host)
    for number in range(1, 6):
        step = AdamStep(lr=1e-2, step=number, weight_decay=0.1, grad_scale=0.3, **options)  # type: ignore[arg-type]
        adamw_(host, step)
        adamw_(device, step)
        assert_same_bits(host, device, f"in step {number}")


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 31, 1023, 1024, 1025, 4096, 32768 * 9 + 5])
def test_sizes(count: int, weight: torch.dtype, make_tensors: MakeTensors) -> None:
    host = make_tensors(count, weight, weight)
    device = on_gpu(host)
    for tensors in (host, device):
        adamw_(tensors, AdamStep(lr=1e-2, step=3))
    assert_same_bits(host, device)


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernel")
def test_subnormals_and_odd_addresses() -> None:
    """Sixty orders of magnitude, and slices that begin anywhere."""
    powers = torch.linspace(-149, 60, 40_007).exp2()
    signs = torch.ones(40_007)
    signs[::2] = -1
    host = AdamTensors(
        weight=powers * signs,
        exp_avg=(powers * signs.flip(0)).roll(7),
        exp_avg_sq=powers.roll(13),
        grad=(powers * signs.flip(0)).roll(3),
        grad_factor=torch.tensor(0.37),
    )
    buffer = torch.zeros(5, 40_010, device="cuda")
    names = ("weight", "exp_avg", "exp_avg_sq", "grad", "grad_factor")
    parts = {}
    for row, (name, start) in enumerate(zip(names, (1, 2, 3, 0, 1), strict=True)):
        source = getattr(host, name)
        parts[name] = buffer[row, start : start + source.numel()].copy_(source.reshape(-1))
    device = AdamTensors(**parts)
    for number in range(1, 4):
        step = AdamStep(lr=1e-2, step=number)
        adamw_(host, step)
        adamw_(device, step)
        assert bool(host.weight.isfinite().all())
        assert_same_bits(host, device, f"in step {number}")


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("weight", DTYPES)
def test_the_factor_is_read_by_the_gpu(weight: torch.dtype, make_tensors: MakeTensors) -> None:
    """The call returns while the stream is still busy, and the factor is what the stream wrote before."""
    host = dataclasses.replace(make_tensors(100_003, weight, torch.bfloat16), grad_factor=torch.tensor(1.0))
    device = on_gpu(host)
    assert host.grad_factor is not None
    assert device.grad_factor is not None
    step = AdamStep(lr=1e-2, step=2, grad_scale=0.7)
    adamw_(host, step)
    adamw_(device, step)  # compiles
    coefficient = torch.tensor(0.3, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    device.grad_factor.copy_(coefficient)
    adamw_(device, step)
    busy = not torch.cuda.current_stream().query()
    host.grad_factor.fill_(0.3)
    adamw_(host, step)
    assert_same_bits(host, device)
    assert busy, "the call waited for the GPU"


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernel")
def test_numbers_of_a_step_compile_nothing(make_tensors: MakeTensors) -> None:
    kernel: Any = pytest.importorskip("stormtorch.native.device_adamw")._update
    device = on_gpu(make_tensors(1000))
    variants = []
    for number, lr in ((1, 1.0), (2, 1e-3), (3, 0.0)):
        adamw_(device, AdamStep(lr=lr, step=number, weight_decay=0.0, eps=float(number == 1), grad_scale=number))
        variants.append(len(kernel.device_caches[device.device.index][0]))
    assert variants == variants[:1] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("weight", DTYPES)
def test_torch_operations_without_triton(
    weight: torch.dtype, make_tensors: MakeTensors, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(adamw, "_device_update", lambda: "hidden by a test")
    host = dataclasses.replace(make_tensors(10_007, weight, weight), grad_factor=torch.tensor(0.3))
    device = on_gpu(host)
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings(action="ignore"):  # the mode is called a prototype
            torch.cuda.set_sync_debug_mode("error")
        with caplog.at_level(logging.WARNING, logger="stormtorch"):
            for number in (1, 2):
                adamw_(device, AdamStep(lr=1e-2, step=number))
    finally:
        with warnings.catch_warnings(action="ignore"):
            torch.cuda.set_sync_debug_mode(before)
    for number in (1, 2):
        adamw_(host, AdamStep(lr=1e-2, step=number))
    assert [record.message.split(";")[0] for record in caplog.records] == ["GPU kernel: not in use (hidden by a test)"]

    def value(tensors: AdamTensors) -> torch.Tensor:
        if weight == torch.bfloat16:
            assert tensors.master is not None
            return join(tensors.weight, tensors.master).cpu()
        return (tensors.weight if tensors.master is None else tensors.master).cpu()

    torch.testing.assert_close(value(host), value(device), rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
def test_what_is_refused(make_tensors: MakeTensors, open_any: Callable[..., Worker]) -> None:
    host = make_tensors(8)
    device = on_gpu(host)
    with pytest.raises(SettingError, match=r"grad is float32\[8\] on cpu.*all on one CUDA device"):
        dataclasses.replace(device, grad=host.grad)
    with pytest.raises(SettingError, match=r"cannot update tensors on cuda:0"):
        open_any().submit(device, AdamStep(lr=1e-2, step=1))
