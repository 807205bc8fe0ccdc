"""Losses and gradient norms on their way from the device: the loop writes them down and never waits for one.

Each step's two numbers are copied to page-locked memory behind the kernels that make them, with an event. Whoever logs
takes those that have arrived; whoever must know them all, because a checkpoint follows, waits.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import torch

from ...core.tags import Tag
from ...memory.books.ledger import Ledger
from ...memory.host.arena import HostArena
from ...memory.host.pinning import page_lock_for

_SLOTS = 256  # steps that may be on their way; then the oldest is waited for


@dataclass(frozen=True)
class Reading:
    """What a step computed; ``norm`` is None where nothing asked for it."""

    step: int
    loss: float
    norm: float | None

    def problem(self) -> str | None:
        """What is not finite, or None."""
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        if self.norm is not None and not math.isfinite(self.norm):
            return f"the norm of the gradients is {self.norm}"
        return None


class Readings:
    """The numbers of each step, in order. For one thread."""

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self._device = device
        self._waiting: deque[tuple[int, bool, torch.Tensor, torch.Event | None]] = deque()
        self._next = 0
        self._arena: HostArena | None = None
        if device.type == "cpu":
            self._slots = torch.zeros((_SLOTS, 2), dtype=torch.float64)
        else:
            self._arena = HostArena(_SLOTS * 16, ledger=ledger, tag=Tag.STAGING, page_lock=page_lock_for(device))
            self._slots = self._arena.tensor((_SLOTS, 2), torch.float64)
        self._arrived: list[Reading] = []

    def put(self, step: int, loss: torch.Tensor, norm: torch.Tensor | None) -> None:
        """Write down what a step has computed or will have. Waits for nothing but a slot."""
        if len(self._waiting) == _SLOTS:
            self._take(wait=True)
        slot = self._slots[self._next % _SLOTS]
        self._next += 1
        for place, number in ((0, loss), (1, norm)):
            if number is not None:  # one of the two may have been computed in RAM
                slot[place].copy_(number.detach().double().reshape(()), non_blocking=True)
        event = None
        if self._device.type != "cpu":
            event = torch.Event(self._device)
            event.record(torch.accelerator.current_stream(self._device))
        self._waiting.append((step, norm is not None, slot, event))

    def ready(self) -> list[Reading]:
        """Those that have arrived since the last call; waits for nothing."""
        while self._waiting and ((event := self._waiting[0][3]) is None or event.query()):
            self._take(wait=False)
        return self._handed()

    def all_but(self, count: int) -> list[Reading]:
        """Those that have arrived, and as many more as leave ``count`` on their way: these are waited for."""
        while len(self._waiting) > count:
            self._take(wait=True)
        return self.ready()

    def all(self) -> list[Reading]:
        """All that are not handed out yet; waits for them."""
        return self.all_but(0)

    def close(self) -> None:
        """Wait for what is on its way, and return the memory."""
        for _, _, _, event in self._waiting:
            if event is not None:
                event.synchronize()
        self._waiting.clear()
        if self._arena is not None:
            del self._slots
            self._arena.close()
            self._arena = None

    def _take(self, *, wait: bool) -> None:
        step, has_norm, slot, event = self._waiting.popleft()
        if wait and event is not None:
            event.synchronize()
        loss, norm = slot.tolist()
        self._arrived.append(Reading(step, loss, norm if has_norm else None))

    def _handed(self) -> list[Reading]:
        found, self._arrived = self._arrived, []
        return found
