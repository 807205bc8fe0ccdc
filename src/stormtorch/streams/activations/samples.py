"""Some values of a tensor, to tell whether a block computes the same in its second run.

A block may keep a state where STORM does not find it (contents.py): in a global, a closure, an object of an object.
Then its second run would compute something else, and gradients would be wrong. So a few values of saved tensors are
compared: of all that a block saves in the first passes, later of a few tensors a pass. Kernels that add in any order
differ in the last digits, and may send a token of a mixture of experts elsewhere: only more than that counts."""

from __future__ import annotations

import torch

_VALUES = 64
_FAR = 0.05  # of the mean distance of values from their mean
_NOISE = 1e-3  # of the mean size of values; more where the dtype is coarser
_MANY = 0.1  # of the values
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def sample_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Values spread over all of ``tensor``, with plain storage; None if they cannot be compared."""
    if tensor.dtype not in _DTYPES or tensor.numel() == 0:
        return None
    with torch.no_grad():
        step = -(-tensor.numel() // _VALUES)
        if tensor.is_contiguous():
            return tensor.detach().view(-1)[::step].clone()
        return tensor.detach().take(torch.arange(0, tensor.numel(), step, device=tensor.device))


def differ(first: torch.Tensor, second: torch.Tensor | None) -> bool:
    """Whether two samples come from different tensors. The host waits."""
    if second is None or first.shape != second.shape:
        return True
    with torch.no_grad():
        one, other = first.double(), second.double()
        both = torch.isfinite(one) & torch.isfinite(other)
        one, other = torch.where(both, one, 0.0), torch.where(both, other, 0.0)
        spread = torch.maximum((one - one.mean()).abs().mean(), (other - other.mean()).abs().mean())
        noise = max(_NOISE, 4 * torch.finfo(first.dtype).eps) * torch.maximum(one.abs().mean(), other.abs().mean())
        far = (one - other).abs() > torch.maximum(_FAR * spread, noise)
        return bool(far.sum() > _MANY * far.numel())
