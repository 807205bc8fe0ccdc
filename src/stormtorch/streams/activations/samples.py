"""Some values of a tensor, to tell whether a block computes the same in its second run.

A block may keep a state where STORM does not find it (contents.py): in a global, a closure, an object of an object.
Then its second run would compute something else, and gradients would be wrong. So in the first passes a few hundred
values of each saved tensor are compared. Kernels that add in any order differ in the last digits: only what differs by
more than that counts."""

from __future__ import annotations

import torch

from ..bridge.torch_private import has_plain_storage

_VALUES = 256
_TOLERANCE = 0.05  # of the length of the vector of values
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def sample_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Values spread over all of ``tensor``; None if they cannot be compared."""
    if not has_plain_storage(tensor) or tensor.dtype not in _DTYPES or tensor.numel() == 0:
        return None
    with torch.no_grad():
        step = max(1, tensor.numel() // _VALUES)
        places = torch.arange(0, tensor.numel(), step, device=tensor.device)
        return tensor.detach().take(places).float()


def differ(first: torch.Tensor, second: torch.Tensor | None) -> bool:
    """Whether two samples come from different tensors. The host waits."""
    if second is None or first.shape != second.shape:
        return True
    with torch.no_grad():
        both = torch.isfinite(first) & torch.isfinite(second)
        first, second = torch.where(both, first, 0.0), torch.where(both, second, 0.0)
        return bool((first - second).norm() > _TOLERANCE * torch.maximum(first.norm(), second.norm()))
