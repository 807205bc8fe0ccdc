"""The kinds of weights and gradients: against the fp32 kernel, a float64 reference, torch's own conversions, and a
checksum that every CPU must reproduce."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from stormtorch.native import update
from stormtorch.native.adamw import adamw_
from stormtorch.native.library import Library
from stormtorch.native.split import join
from stormtorch.native.update import AdamStep, AdamTensors

MakeTensors = Callable[..., AdamTensors]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STILL = AdamStep(lr=0.0, step=1, weight_decay=0.0, eps=1.0)  # with zero gradient and moments: weights stay as they are


def master_of(tensors: AdamTensors) -> torch.Tensor:
    if tensors.master is None:
        return tensors.weight
    return join(tensors.weight, tensors.master) if tensors.weight.dtype == torch.bfloat16 else tensors.master


def still(weight: torch.Tensor, master: torch.Tensor) -> None:
    """Reads and writes back every master through the C code."""
    m, v, g = (torch.zeros(weight.numel()) for _ in range(3))
    adamw_(AdamTensors(weight=weight, master=master, exp_avg=m, exp_avg_sq=v, grad=g), STILL)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decoupled", [True, False])
def test_masters_take_the_steps_of_fp32(
    weight: torch.dtype, grad: torch.dtype, decoupled: bool, make_tensors: MakeTensors
) -> None:
    tensors = make_tensors(10_007, weight, grad)
    plain = AdamTensors(
        weight=master_of(tensors).clone(),
        exp_avg=tensors.exp_avg.clone(),
        exp_avg_sq=tensors.exp_avg_sq.clone(),
        grad=tensors.grad.float(),
    )
    for number in range(1, 21):
        step = AdamStep(lr=1e-2, step=number, decoupled=decoupled, grad_scale=0.37)
        adamw_(tensors, step)
        adamw_(plain, step)
    assert torch.equal(master_of(tensors), plain.weight)
    assert torch.equal(tensors.exp_avg, plain.exp_avg)
    assert torch.equal(tensors.exp_avg_sq, plain.exp_avg_sq)
    image = plain.weight.half() if weight == torch.float16 else None
    if image is not None:
        assert torch.equal(tensors.weight, image)
    else:  # nearest: no bf16 value is closer
        error = (tensors.weight.double() - plain.weight.double()).abs()
        assert bool((error <= (plain.weight.bfloat16().double() - plain.weight.double()).abs()).all())


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("decoupled", [True, False])
def test_against_float64(weight: torch.dtype, decoupled: bool, make_tensors: MakeTensors) -> None:
    tensors = make_tensors(50_000, weight)
    step = AdamStep(lr=3e-3, step=9, weight_decay=0.1, decoupled=decoupled, maximize=True, grad_scale=0.25)
    p, m, v, g = (t.double() for t in (master_of(tensors), tensors.exp_avg, tensors.exp_avg_sq, tensors.grad))
    size = m.abs() + 0.25 * g.abs() + 0.1 * p.abs()  # of the terms of m: where they cancel, their roundings stay
    g = -0.25 * g
    if not decoupled:
        g = g + 0.1 * p
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    change = 3e-3 / (1 - 0.9**9) * m / ((v / (1 - 0.999**9)).sqrt() + 1e-8)
    p = p * (1 - 3e-3 * 0.1 if decoupled else 1) - change
    adamw_(tensors, step)
    unit = 2.0**-23
    assert bool(((tensors.exp_avg - m).abs() <= unit * size).all())
    assert bool(((tensors.exp_avg_sq - v).abs() <= 4 * unit * (v + 0.001 * size * size)).all())
    error = (master_of(tensors).double() - p).abs()
    assert bool((error <= unit * (1.5 * p.abs() + 4 * (change / m).abs() * size)).all())


@pytest.mark.usefixtures("native")
def test_every_fp16_gradient_is_widened_exactly() -> None:
    grad = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    for beta1, expected in ((0.0, grad.float()), (0.75, grad.float() * 0.25)):  # 0.75: infinities survive, -0 does not
        m = torch.zeros(grad.numel())
        w, v = torch.zeros_like(m), torch.zeros_like(m)
        step = AdamStep(lr=0.0, step=1, betas=(beta1, 0.5))
        adamw_(AdamTensors(weight=w, exp_avg=m, exp_avg_sq=v, grad=grad), step)
        compared = expected.isfinite() if beta1 == 0.0 else ~expected.isnan() & (expected != 0)
        assert torch.equal(m.view(torch.int32)[compared], expected.view(torch.int32)[compared])
        assert bool(m[expected.isnan()].isnan().all())


@pytest.mark.usefixtures("native")
def test_fp16_image_is_rounded_as_torch_rounds() -> None:
    halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    values = halves[~halves.isnan()].sort().values
    middles = (values[:-1].double() + values[1:].double()).mul(0.5).float()
    edges = [torch.nextafter(middles, torch.tensor(end)) for end in (torch.inf, -torch.inf)]
    limits = torch.tensor([65504.0, 65519.996, 65520.0, 65536.0, 3.4e38, torch.inf, 2.0**-25, 2.0**-26, 1e-45])
    noise = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 20,), dtype=torch.int32).view(torch.float32)
    master = torch.cat([halves, middles, *edges, limits, -limits, noise])
    image = torch.zeros(master.numel(), dtype=torch.float16)
    before = master.clone()
    still(image, master)
    number = ~before.isnan()
    assert torch.equal(image.view(torch.int16)[number], before.half().view(torch.int16)[number])
    assert bool(image[~number].isnan().all())
    assert bool(master[~number].isnan().all())
    assert torch.equal(master.view(torch.int32)[number], before.view(torch.int32)[number])


@pytest.mark.usefixtures("native")
def test_split_masters_survive_the_kernel_bit_for_bit() -> None:
    """Every image with a dense set of remainders, read and written by the C code; expectation in plain integers."""
    low = np.unique(np.r_[0:40, 0x7FE0:0x8020, 0xFFD8:0x10000, 1 << np.arange(16)]).astype(np.uint32)
    bits = ((np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | low).reshape(-1)
    number = (bits & 0x7FFFFFFF) <= 0x7F800000
    high = ((bits.astype(np.int64) + 0x8000) >> 16 & 0xFFFF).astype(np.uint16)
    rest = (bits & 0xFFFF).astype(np.uint16)
    weight, master = torch.from_numpy(high.view(np.int16).copy()), torch.from_numpy(rest.view(np.int16).copy())
    still(weight.view(torch.bfloat16), master)
    assert np.array_equal(weight.numpy().view(np.uint16)[number], high[number])
    assert np.array_equal(master.numpy().view(np.uint16)[number], rest[number])


@pytest.mark.usefixtures("native")
def test_nan_and_infinity_stay_what_they_are() -> None:
    image = torch.tensor([0x7F80, -0x80, 0x7FC1, 0x7F81, -1, 0x7FFF], dtype=torch.int16).view(torch.bfloat16)
    remainder = torch.tensor([0, 0, 5, -32768, 32767, 32767], dtype=torch.int16)
    still(image, remainder)
    assert image.view(torch.int16).tolist() == [0x7F80, -0x80] + [0x7FC0] * 4
    assert remainder.tolist() == [0] * 6
    assert bool(join(image, remainder)[2:].isnan().all())

    largest = torch.tensor([torch.finfo(torch.float32).max])
    hidden = torch.tensor([-1], dtype=torch.int16)
    rounded = torch.tensor([torch.inf], dtype=torch.bfloat16)
    still(rounded, hidden)
    assert rounded.item() == torch.inf
    assert torch.equal(join(rounded, hidden), largest)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("weight", DTYPES)
def test_a_nan_gradient_reaches_its_element_only(weight: torch.dtype, make_tensors: MakeTensors) -> None:
    tensors = make_tensors(100, weight)
    tensors.grad[17] = torch.nan
    adamw_(tensors, AdamStep(lr=1e-3, step=1))
    for result in (tensors.weight, master_of(tensors), tensors.exp_avg, tensors.exp_avg_sq):
        assert result.isnan().nonzero().flatten().tolist() == [17]


@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("weight", DTYPES)
def test_instruction_sets_agree(
    weight: torch.dtype, grad: torch.dtype, native: Library, make_tensors: MakeTensors
) -> None:
    if len(native.isas) == 1:
        pytest.skip(f"this CPU runs only {native.isa}; the checksum test compares it with the others")
    results = []
    for isa in native.isas:
        tensors = make_tensors(4099, weight, grad, offset=1)
        for number in range(1, 4):
            for decoupled in (True, False):
                adamw_(tensors, AdamStep(lr=1e-2, step=number, decoupled=decoupled, betas=(0.4, 0.9)), isa=isa)
        results.append((tensors.weight, master_of(tensors), tensors.exp_avg, tensors.exp_avg_sq))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


CHECKSUMS = {
    (torch.float32, 0): "be99374dc0a11fd6",
    (torch.float32, 4): "41958d83faea9b0b",
    (torch.bfloat16, 0): "4243a753d574a8e5",
    (torch.bfloat16, 4): "906b4f96192176aa",
    (torch.float16, 0): "89a3f760ef6af003",
    (torch.float16, 4): "de461c3ab72ff899",
}


@pytest.mark.parametrize(("weight", "fusion"), CHECKSUMS, ids=str)
def test_checksum_is_the_same_on_every_machine(
    weight: torch.dtype, fusion: int, native: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers from integer arithmetic only, so that they do not depend on a library's generator."""
    monkeypatch.setattr(update, "_FUSION", fusion)

    def numbers(seed: int) -> torch.Tensor:
        mixed = (np.arange(20_011, dtype=np.uint64) * 2654435761 + seed * 40503) % (1 << 32)
        mixed = (mixed ^ (mixed >> np.uint64(15))) * 2246822519 % (1 << 32)
        return torch.from_numpy((mixed >> np.uint64(8)).astype(np.float32) * np.float32(2**-24) - np.float32(0.5))

    for isa in native.isas:
        value = numbers(1)
        image, master = value, None
        if weight == torch.bfloat16:
            bits = value.view(torch.int32)
            image, master = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)
        elif weight == torch.float16:
            image, master = torch.zeros(value.numel(), dtype=torch.float16), value
        tensors = AdamTensors(
            weight=image,
            master=master,
            exp_avg=numbers(2),
            exp_avg_sq=numbers(3).square_(),
            grad=numbers(4).to(weight),
        )
        for number in range(1, 9):
            step = AdamStep(lr=2e-2, step=number, decoupled=number % 2 == 0, betas=(0.9 if number % 3 else 0.25, 0.97))
            adamw_(tensors, step, isa=isa)
        digest = hashlib.sha256()
        for tensor in (image, master, tensors.exp_avg, tensors.exp_avg_sq):
            if tensor is not None:
                digest.update(tensor.view(torch.uint8).numpy().tobytes())
        assert digest.hexdigest()[:16] == CHECKSUMS[weight, fusion], isa
