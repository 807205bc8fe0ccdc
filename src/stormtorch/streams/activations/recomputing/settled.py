"""A block that passes have shown to be repeatable, and that the plan recomputes: its tensors are dropped while it runs.

To hold each of them until the block has ended, and then to look whether the block has changed anything, takes the host
longer than all other work of recomputation. So both are left out here. If such a block replaces attributes, buffers or
items of containers for the first time, the second run finds what the first one found, as it does after changes of user
code. If it writes to a tensor in place, computes gradients or draws random numbers from numpy for the first time,
backward raises an error: nothing is left to compute with.

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
