"""What a step costs whose optimizer states all lie on disk: AdamW with fp32 masters, each state read and written once.

Pure arithmetic. The time is that of the disk alone: a step also takes at least the time of its compute, once for all of
its micro-batches, so accumulation hides the disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["bf16", "fp16", "fp32"]
# Two moments of fp32, and: 16 bits to complete a bf16 weight to its master; a whole master; nothing.
_STATE_BYTES: dict[Dtype, int] = {"bf16": 10, "fp16": 12, "fp32": 8}
_WEIGHT_BYTES: dict[Dtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
_RING = 0.35  # of the weights' bytes, at most as measured: the gradients that step="backward" has in RAM at a time


@dataclass(frozen=True, kw_only=True)
class DiskStep:
    """The cost of one step. A step reads and writes ``state_bytes`` each."""

    parameters: int
    dtype: Dtype
    state_bytes: int  # on disk
    seconds: float  # of the disk
    ram_bytes: int  # weights and gradients
    ram_backward_bytes: int  # with step="backward", whose gradients pass through a ring

    def drive_life(self, steps: int, endurance_bytes: float) -> float:
        """The share of what a drive may be written in its life that so many steps write."""
        return self.state_bytes * steps / endurance_bytes


def disk_step(parameters: int, *, mixed_bytes_per_s: float, dtype: Dtype = "bf16") -> DiskStep:
    """The cost of a step that trains ``parameters``, on a disk that reads and writes at this rate in all."""
    state_bytes, weight_bytes = parameters * _STATE_BYTES[dtype], parameters * _WEIGHT_BYTES[dtype]
    return DiskStep(
        parameters=parameters,
        dtype=dtype,
        state_bytes=state_bytes,
        seconds=2 * state_bytes / mixed_bytes_per_s,
        ram_bytes=2 * weight_bytes,
        ram_backward_bytes=int(weight_bytes * (1 + _RING)),
    )
