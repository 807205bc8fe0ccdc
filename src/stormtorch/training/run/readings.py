"""Copies losses and gradient norms from the device, without waiting for them.

Each step's two numbers are copied to page-locked memory after the kernels that compute them, with an event. Logging
takes those that have arrived; a checkpoint waits for all of them.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass

import torch

from ...core.endings import Closing
from ...core.tags import Tag
from ...memory.books.ledger import Ledger
from ...memory.host.arena import HostArena
from ...memory.host.pinning import page_lock_for

_SLOTS = 256  # the most steps in flight; the loop takes readings after each


@dataclass(frozen=True)
class Reading:
    """The numbers of a step; ``norm``: None if it was not computed."""

    step: int
    loss: float
    norm: float | None

    def problem(self) -> str | None:
        """The value that is not finite, as text, or None."""
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        if self.norm is not None and not math.isfinite(self.norm):
            return f"the norm of the gradients is {self.norm}"
        return None


class Readings(Closing):
    """The numbers of each step, in order. For one thread."""

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self._device = device
        self._waiting: deque[tuple[int, bool, torch.Tensor, torch.Event | None]] = deque()
        self._arena = HostArena(_SLOTS * 16, ledger=ledger, tag=Tag.STAGING, page_lock=page_lock_for(device))
        self._slots = itertools.cycle(self._arena.tensor((_SLOTS, 2), torch.float64))

    def put(self, step: int, loss: torch.Tensor, norm: torch.Tensor | None) -> None:
        """Queue the copy of a step's numbers; waits for nothing."""
        assert len(self._waiting) < _SLOTS
        slot = next(self._slots)
        for place, number in ((0, loss), (1, norm)):
            if number is not None:  # either may lie in RAM
                slot[place].copy_(number.detach().double().reshape(()), non_blocking=True)
        event = None
        if self._device.type != "cpu":
            event = torch.Event(self._device)
            event.record(torch.accelerator.current_stream(self._device))
        self._waiting.append((step, norm is not None, slot, event))

    def all_but(self, count: int) -> list[Reading]:
        """All readings but the last ``count``, for which it waits, and those of the last that have arrived."""
        found = []
        while self._waiting:
            step, has_norm, slot, event = self._waiting[0]
            if event is not None:
                if len(self._waiting) <= count and not event.query():
                    break
                event.synchronize()
            self._waiting.popleft()
            loss, norm = slot.tolist()
            found.append(Reading(step, loss, norm if has_norm else None))
        return found

    def all(self) -> list[Reading]:
        """All readings that were not returned yet; waits for them."""
        return self.all_but(0)

    def close(self) -> None:
        """Wait for running copies, and return the memory."""
        self.all()
        self._arena.close()
