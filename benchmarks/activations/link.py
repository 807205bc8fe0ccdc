"""What the link gives to one plain copy of pinned memory at a time, each way."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

_BYTES = 128 << 20
_COPIES = 8
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Link:
    in_bytes_per_s: float
    out_bytes_per_s: float


def measure_link(device: torch.device) -> Link:
    """Blocks for about a tenth of a second. Takes and gives back 128 MiB on the device."""
    here = torch.ones(_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.ones(_BYTES, dtype=torch.uint8, device=device)
    link = Link(in_bytes_per_s=_rate(there, here), out_bytes_per_s=_rate(here, there))
    del here, there
    torch.cuda.empty_cache()
    return link


def _rate(target: Tensor, source: Tensor) -> float:
    rates: list[float] = []
    for _ in range(1 + _ROUNDS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(_COPIES):
            target.copy_(source, non_blocking=True)
        last.record()
        last.synchronize()
        rates.append(_COPIES * _BYTES / (first.elapsed_time(last) / 1e3))
    return statistics.median(rates[1:])
