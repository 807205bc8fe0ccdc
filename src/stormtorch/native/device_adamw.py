"""The update of csrc/adamw.h as a Triton kernel. It gives the C kernels' bits: an element may be updated anywhere.

Importing this needs triton, so only adamw.py imports it, at the first update on a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from .library import Scalars
from .update import FROM_GRAD, L2, SQUARE_FUSED, AdamTensors

triton: Any = importlib.import_module("triton")  # not a dependency of ours, nor known to the type checker
tl: Any = importlib.import_module("triton.language")

_BLOCK = 1024  # elements of one program


# A factor's alignment must not cost a compilation of its own. Scalars are floats, which triton takes as fp32 and never
# specialises on; ours are fp32 values already, so nothing is rounded on the way.
@triton.jit(do_not_specialize=["grad_factor"])  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    weight, master, exp_avg, exp_avg_sq, grad, grad_factor, count,
    grad_scale, l2, decay, lerp_weight, beta2, grad_sq_weight, root_bias2, eps, minus_step_size,
    split: tl.constexpr, image: tl.constexpr, with_factor: tl.constexpr,
    with_l2: tl.constexpr, from_grad: tl.constexpr, square_fused: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    if with_factor:
        grad_scale = grad_scale * tl.load(grad_factor)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * grad_scale
    if split:
        high = tl.load(weight + at, mask=inside, other=0).to(tl.int32) << 16
        p = (high + tl.load(master + at, mask=inside, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    elif image:
        p = tl.load(master + at, mask=inside, other=0.0)
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
    elif image:
        tl.store(weight + at, p.to(tl.float16), mask=inside)
        tl.store(master + at, p, mask=inside)
    else:
        tl.store(weight + at, p, mask=inside)


def update_(tensors: AdamTensors, scalars: Scalars) -> None:
    """Launch the update on the current stream of the tensors' device, without waiting."""
    count, s = tensors.numel, scalars
    if count == 0:
        return
    weight, master, factor = tensors.weight.detach(), tensors.master, tensors.grad_factor
    split = weight.dtype == torch.bfloat16
    with torch.cuda.device(tensors.device):
        _update[(triton.cdiv(count, _BLOCK),)](
            weight.view(torch.int16) if split else weight,
            weight if master is None else master,  # without a master, any pointer: the kernel does not read it
            tensors.exp_avg, tensors.exp_avg_sq, tensors.grad,
            tensors.exp_avg if factor is None else factor,
            count,
            s.grad_scale, s.l2, s.decay, s.lerp_weight, s.beta2, s.grad_sq_weight, s.root_bias2, s.eps,
            s.minus_step_size,
            split, weight.dtype == torch.float16, factor is not None,
            bool(s.flags & L2), bool(s.flags & FROM_GRAD), bool(s.flags & SQUARE_FUSED), _BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
