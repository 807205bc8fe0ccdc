"""Times work of compute, without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
Reading = Callable[[], "float | None"]
"""Returns the seconds, or None while the device is still computing."""


def timed(device: torch.device, call: Callable[[], T]) -> tuple[T, Reading]:
    """Run ``call``; returns its result, and a function that gives the seconds ``device`` computed for it."""
    if device.type != "cuda":
        start_s = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start_s
        return result, lambda: seconds
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    result = call()
    after.record()
    return result, lambda: before.elapsed_time(after) / 1e3 if after.query() else None
