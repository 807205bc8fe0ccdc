"""The update of csrc/adamw.h in torch operations: for a missing C library, or a GPU without triton.

It follows the specification operation by operation. Only fma has no counterpart: it is computed in float64, where the
product is exact, so that a result can differ from the native one by a single rounding, and hardly ever does. The work
goes in chunks, because each operation needs a temporary and the tensors here are as large as models.
"""

from __future__ import annotations

import torch

from .library import Scalars
from .split import join, split
from .update import FROM_GRAD, L2, SQUARE_FUSED, AdamTensors

CHUNK = 1 << 18  # elements; about 10 MiB of temporaries


def _sqrt(x: torch.Tensor) -> torch.Tensor:
    """Square root rounded to nearest, as in IEEE. torch's on x86-64 is a vendor's, off by one in 7 of 1,000 cases."""
    return x.double().sqrt_().float()


def _fma(a: torch.Tensor | float, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return b.double().mul_(a).add_(c).float()


@torch.inference_mode()
def read_scale(tensors: AdamTensors, scalars: Scalars) -> torch.Tensor | float:
    """The gradients' multiplier, with the factor read now. It remains on its device: no wait for a GPU."""
    factor = tensors.grad_factor
    return float(scalars.grad_scale) if factor is None else factor.view(()).mul(scalars.grad_scale)


@torch.inference_mode()  # inference tensors may be changed only under it, and a worker's thread never inherits it
def update_(
    tensors: AdamTensors, scalars: Scalars, first: int, last: int, scale: torch.Tensor | float | None = None
) -> None:
    """Update elements ``[first, last)`` in place, on the calling thread and torch's own. ``scale``: the result of
    ``read_scale`` when the update began; by default it is read now."""
    if scale is None:
        scale = read_scale(tensors, scalars)
    for start in range(first, last, CHUNK):
        tensors.bring(start, min(start + CHUNK, last))
        _update_chunk(tensors, scalars, scale, slice(start, min(start + CHUNK, last)))


def _update_chunk(tensors: AdamTensors, s: Scalars, scale: torch.Tensor | float, chunk: slice) -> None:
    weight, m, v = (t.view(-1)[chunk] for t in (tensors.weight, tensors.exp_avg, tensors.exp_avg_sq))
    master = None if tensors.master is None else tensors.master.view(-1)[chunk]
    g = tensors.grad.view(-1)[chunk].float() * scale
    if master is None:
        p = weight
    elif weight.dtype == torch.bfloat16:
        p = join(weight, master)
    else:
        p = master

    if s.flags & L2:
        g = _fma(s.l2, p, g)
    p = p * s.decay
    m.copy_(_fma(s.lerp_weight, g - m, g if s.flags & FROM_GRAD else m))
    square = g * s.grad_sq_weight
    v.copy_(_fma(square, g, v * s.beta2) if s.flags & SQUARE_FUSED else _fma(s.beta2, v, square.mul_(g)))
    p += m.mul(s.minus_step_size).div_(_sqrt(v).div_(s.root_bias2).add_(s.eps))

    if master is None:
        weight.copy_(p)
    elif weight.dtype == torch.bfloat16:
        image, remainder = split(p)
        weight.copy_(image)
        master.copy_(remainder)
    else:
        master.copy_(p)
        weight.copy_(p)
