"""Some values of a tensor, to tell whether a block computes the same in its second run.

A block may keep a state where STORM does not find it (contents.py): in a global, a closure, an object of an object.
Then its second run would compute something else, and gradients would be wrong. So a few values of saved tensors are
compared: of all that a block saves in the first passes, later of a few tensors a pass. Kernels that add in any order
differ in the last digits, and may send a token of a mixture of experts elsewhere: only more than that counts. Tensors
that torch saves and never fills differ too: then the block's results decide, which differ less, for most blocks add
something to their input.

In the steady loop the host does not wait for the device: a difference is noted there (`Doubts`) and seen when a later
pass begins. Then the next second run of that block is compared with the host waiting."""

from __future__ import annotations

from collections import deque

import torch

from ....memory.cuda.answers import Answers

_VALUES = 64
_NOTED = 64  # differences that the host has not looked at
# Differences that may be noise, of tensors that a block saves and of its results: of the mean size of values; in ulps.
SAVED, RESULTS = (1e-3, 4.0), (1e-4, 1.0)
_MANY = 0.1  # of the values
_LEAST_WHOLE = 8  # a few whole numbers are seeds and counters of torch's own kernels
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def sample_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Values spread over all of ``tensor``, with plain storage; None if they cannot be compared."""
    least = 1 if tensor.dtype in _FLOATS else _LEAST_WHOLE
    if tensor.dtype not in (*_FLOATS, *_WHOLE) or tensor.numel() < least:
        return None
    with torch.no_grad():
        step = -(-tensor.numel() // _VALUES)
        if tensor.is_contiguous():
            return tensor.detach().view(-1)[::step].clone()
        return tensor.detach().take(torch.arange(0, tensor.numel(), step, device=tensor.device))


class Doubts:
    """Differences between the two runs of blocks that the device computes and the host has not looked at yet, and the
    blocks that have differed (``suspects``). Knows blocks by number."""

    def __init__(self) -> None:
        self._answers: Answers | None = None
        # By any thread: the block, whether it differs, when that is there, and the same on the device.
        self._noted: deque[tuple[int, torch.Tensor, torch.cuda.Event | None, torch.Tensor]] = deque()
        self.suspects: set[int] = set()

    def note(self, block: int, differs: torch.Tensor) -> bool:
        """Leave it to ``look_back`` whether a block differs. Returns False: nothing is certain yet."""
        if not differs.is_cuda:  # of a number that the block computes with, for example
            self._noted.append((block, differs, None, differs))
        elif len(self._noted) < _NOTED:  # else the device is many passes behind
            if self._answers is None:
                self._answers = Answers(differs.device, 2 * _NOTED)
            self._noted.append((block, *self._answers.copy(differs), differs))
        return False

    def ask(self, block: int, differs: torch.Tensor) -> bool:
        """Whether a block differs. The host waits."""
        self.suspects.discard(block)
        return bool(differs)

    def look_back(self) -> None:
        """Find suspects, as far as the device has come."""
        for _ in range(len(self._noted)):
            block, differs, event, source = self._noted.popleft()
            if event is not None and not event.query():
                self._noted.append((block, differs, event, source))
            elif differs:
                self.suspects.add(block)


def differ(first: torch.Tensor, second: torch.Tensor | None, noise: tuple[float, float]) -> torch.Tensor:
    """Whether two samples come from tensors made in different states; on their device."""
    least, ulps = noise
    if second is None or first.shape != second.shape:
        return torch.ones((), dtype=torch.bool, device=first.device)
    with torch.no_grad():
        one, other = first.double(), second.double()
        both = torch.isfinite(one) & torch.isfinite(other)
        one, other = torch.where(both, one, 0.0), torch.where(both, other, 0.0)
        part = max(least, ulps * torch.finfo(first.dtype).eps) if first.is_floating_point() else 0.0
        far = (one - other).abs() > part * torch.maximum(one.abs().mean(), other.abs().mean())
        return far.sum() > _MANY * far.numel()
