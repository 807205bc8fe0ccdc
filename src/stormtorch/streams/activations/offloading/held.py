"""A saved tensor that remains on the device.

A saved-tensor hook must not return the tensor that it was given: if that is the output of its own node, node and tensor
would keep each other alive, and a dropped graph would never be freed. Also, with hooks, torch leaves the check for
in-place changes to them."""

from __future__ import annotations

import torch

from ....core.errors import StaleGraph


class Held:
    """``tensor`` without its graph, and its version."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = None if tensor.is_inference() else tensor._version

    @property
    def changed(self) -> bool:
        """Whether it was written to after it was saved."""
        return self.version is not None and self.tensor._version != self.version

    def get(self) -> torch.Tensor:
        if self.changed:
            raise stale(self.tensor.shape, self.tensor.dtype)
        return self.tensor


def stale(shape: torch.Size, dtype: torch.dtype) -> StaleGraph:
    """autograd's own error, with its words for code that matches them."""
    return StaleGraph(
        "Cannot run backward: one of the variables needed for gradient computation has been modified by an inplace "
        f"operation (shape {tuple(shape)}, {dtype})."
    )
