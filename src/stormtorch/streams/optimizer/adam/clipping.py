"""Clipping by user code, gradient by gradient, until it is known whether all gradients are scaled alike.

``torch.nn.utils.clip_grad_norm_`` multiplies every gradient by the same number. Done at once, that reads and writes all
gradients in RAM. So a multiplication is noted. If the next update finds all gradients noted, the kernel that updates
scales them too; if user code reads a gradient before, or scales only some, they are multiplied in RAM as asked."""

from __future__ import annotations

import torch


class Scaling:
    """Gradients that ``source``, a number, is to multiply, each once."""

    __slots__ = ("_source", "_version", "factor", "is_one", "places")

    def __init__(self, source: torch.Tensor) -> None:
        self._source, self._version = source, source._version
        self.factor = source.detach().to(torch.float32, copy=True)
        self.is_one = float(self.factor) == 1.0  # nothing is clipped
        self.places: set[tuple[int, int]] = set()  # index of the unit, and of the place in it

    def takes(self, source: torch.Tensor, place: tuple[int, int]) -> bool:
        """Note ``place``; False if it was noted before, or ``source`` is another number."""
        if source is not self._source or source._version != self._version or place in self.places:
            return False
        self.places.add(place)
        return True
