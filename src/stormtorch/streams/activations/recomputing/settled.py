"""Runs blocks that are settled: earlier passes have shown that they repeat, and the plan recomputes them.

`SettledRun` drops a block's saved tensors while the block runs. `BlockRun` holds them until the block has ended, and
then checks whether the block has changed anything; that takes the host longer than all other work of recomputation. A
settled block may begin to replace attributes, buffers or items of containers: the second run restores what the first
one found, as it does after changes by user code. If the block begins to write to a tensor in place or to compute
gradients, backward raises an error, because the saved tensors are gone. If it begins to draw random numbers from numpy,
the second run draws them again, and backward raises an error where it cannot repeat them.

A write to a block's result by user code is no error here. Gradients are those of the forward."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ...bridge.torch_private import never_traced
from .recompute import BlockRun, Saved


class SettledRun(BlockRun):
    """A call of such a block."""

    @never_traced
    def pack(self, tensor: torch.Tensor) -> Any:
        """Hook for autograd: note ``tensor``, and drop it."""
        low, high = self._weights.span
        try:
            address = tensor.data_ptr()
        except (RuntimeError, NotImplementedError):
            address = -1  # it has no memory of its own
        if low <= address < high and (note := self._note_of(tensor)) is not None:
            return note
        saved = Saved(self, len(self._saved), tensor, address)
        self._saved.append(weakref.ref(saved))
        return saved

    def end(self, _result: Any, *, look_inside: bool = False) -> bool:  # noqa: ARG002
        """Note that the block has run. Returns whether another call may be settled."""
        assert self._conditions is not None
        self._has_ended = self.repeats = True
        if self._conditions.tensors_changed() or self._inputs_changed():
            self._refusal = "it wrote to one of its tensors or arguments in place, for the first time"
        elif self._conditions.has_drawn():
            self._conditions.replay_numpy()
        else:
            return True
        return False

    def drop(self, *, inputs_away: bool) -> None:
        """Keep the inputs, or offload them."""
        self._keep_inputs(away=inputs_away)

    def _run_again(self) -> None:
        if not self._has_ended:
            raise self._other("it computed gradients in its forward, for the first time")
        super()._run_again()
