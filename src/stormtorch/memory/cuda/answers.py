"""Small results of compute that the host reads later, without waiting."""

from __future__ import annotations

import torch

from .driver import device_index, driver
from .streams import OwnStream


class Answers:
    """Yes or no, from a GPU to RAM, on a stream of its own: compute does not wait for the copy engine. The few bytes of
    page-locked RAM are torch's and not in the ledger."""

    def __init__(self, device: torch.device, count: int) -> None:
        """``count`` of them may be on their way."""
        cuda = driver()
        self._device, self._next = device, 0
        self._own = None if cuda is None else OwnStream(cuda, device_index(device))
        self._stream = torch.cuda.Stream(device) if self._own is None else self._own.stream
        with torch.inference_mode(False):
            self._answers = torch.zeros(max(64, count), dtype=torch.bool, device="cpu", pin_memory=True)

    def copy(self, answer: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Where ``answer`` will be in RAM, and when. The caller keeps it until then."""
        self._next = (self._next + 1) % len(self._answers)
        here, made, done = self._answers[self._next], torch.cuda.Event(), torch.cuda.Event()
        made.record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            self._stream.wait_event(made)
            here.copy_(answer, non_blocking=True)
            done.record(self._stream)
        return here, done
