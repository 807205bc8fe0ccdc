"""A GPU kernel written from csrc/adamw.h gives the bits of the C kernel: an element may be updated on either side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stormtorch.native.adamw import adamw_
from stormtorch.native.update import AdamStep, AdamTensors

MakeTensors = Callable[..., AdamTensors]

triton: Any = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")
BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def update(  # type: ignore[no-untyped-def]
    weight, master, exp_avg, exp_avg_sq, grad, count,
    grad_scale, l2, decay, lerp_weight, beta2, grad_sq_weight, root_bias2, eps, minus_step_size,
    with_l2: tl.constexpr, from_grad: tl.constexpr, square_fused: tl.constexpr, split: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * grad_scale
    if split:
        high = tl.load(weight + at, mask=inside, other=0).to(tl.int32) << 16
        p = (high + tl.load(master + at, mask=inside, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        p = tl.load(weight + at, mask=inside, other=0.0)
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    if with_l2:
        g = tl.fma(p, tl.zeros_like(p) + l2, g)
    p = p * decay
    m = tl.fma(tl.zeros_like(p) + lerp_weight, g - m, g if from_grad else m)
    square = grad_sq_weight * g
    v = tl.fma(square, g, v * beta2) if square_fused else tl.fma(v, tl.zeros_like(p) + beta2, square * g)
    d = tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(p) + root_bias2) + eps
    p = p + tl.div_rn(minus_step_size * m, d)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    if split:
        bits = tl.where(p != p, 0x7FC00000, p.to(tl.int32, bitcast=True))  # noqa: PLR0124  a NaN
        tl.store(weight + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
        tl.store(master + at, bits.to(tl.int16), mask=inside)
    else:
        tl.store(weight + at, p, mask=inside)


def update_on_gpu(tensors: dict[str, torch.Tensor], step: AdamStep) -> None:
    s: Any = step.scalars
    split = "master" in tensors
    count = tensors["weight"].numel()
    update[(triton.cdiv(count, BLOCK),)](
        tensors["weight"].view(torch.int16) if split else tensors["weight"],
        tensors.get("master", tensors["weight"]),
        tensors["exp_avg"], tensors["exp_avg_sq"], tensors["grad"], count,
        s.grad_scale, s.l2, s.decay, s.lerp_weight, s.beta2, s.grad_sq_weight, s.root_bias2, s.eps, s.minus_step_size,
        bool(s.flags & 1), bool(s.flags & 2), bool(s.flags & 4), split, BLOCK,
        enable_fp_fusion=False,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("options", [{}, {"decoupled": False}, {"betas": (0.25, 0.9), "maximize": True}], ids=str)
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
def test_same_bits_on_the_gpu(
    weight: torch.dtype, grad: torch.dtype, options: dict[str, object], make_tensors: MakeTensors
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none here")
    host = make_tensors(100_003, weight, grad)
    names = ("weight", "master", "exp_avg", "exp_avg_sq", "grad")
    device = {name: tensor.cuda() for name in names if (tensor := getattr(host, name)) is not None}
    for number in range(1, 6):
        step = AdamStep(lr=1e-2, step=number, weight_decay=0.1, grad_scale=0.3, **options)  # type: ignore[arg-type]
        adamw_(host, step)
        update_on_gpu(device, step)
        for name in device.keys() - {"grad"}:
            ours, theirs = getattr(host, name), device[name].cpu()
            assert torch.equal(ours, theirs), (
                f"{int((ours != theirs).sum())} elements of {name} differ in step {number}"
            )
