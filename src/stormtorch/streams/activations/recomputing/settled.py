"""A block that passes have shown to be repeatable, and that the plan recomputes: its tensors are dropped while it runs.

To hold each of them until the block has ended, and then to look whether the block has changed anything, takes the host
longer than all other work of recomputation. So both are left out here. If such a block changes its attributes,
containers or small buffers for the first time, the second run finds what the first one found, as it does after changes
of user code. If it overwrites its inputs or large tensors, or draws random numbers from numpy, for the first time,
backward raises an error: nothing is left to compute with."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ...bridge.torch_private import VersionProbe, has_plain_storage, never_traced
from .blocks import leaves_of
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

    def end(self, result: Any, *, look_inside: bool = False) -> bool:  # noqa: ARG002
        """Note that the block has run and returned ``result``. Returns True: it will run again."""
        assert self._conditions is not None
        self.repeats = True
        if self._conditions.has_drawn():
            self._refusal = "it drew random numbers from numpy, for the first time"
        elif self._inputs_changed():
            self._refusal = "it overwrote an argument, for the first time"
        outputs = []
        for leaf in leaves_of(result):
            if isinstance(leaf, torch.Tensor) and has_plain_storage(leaf) and not leaf.is_inference():
                storage = leaf.untyped_storage()
                first = storage.data_ptr()
                outputs.append((first, first + storage.nbytes(), leaf))
        for reference in self._saved:
            saved = reference()
            if saved is not None:
                for first, end, leaf in outputs:
                    if first <= saved.address < end:
                        saved.probe = VersionProbe(leaf)
        return True

    def drop(self, *, inputs_away: bool) -> None:
        """Keep the inputs, or offload them."""
        self._keep_inputs(away=inputs_away)
