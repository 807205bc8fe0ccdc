"""What took the host's time during some steps, besides launching kernels: Python's garbage collections, and calls of
torch's allocator to the driver, during which the device stands still."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

_DRIVER = {"allocated": "num_device_alloc", "freed": "num_device_free", "retried": "num_alloc_retries"}


class HostTime:
    """Counts from its construction until ``close``."""

    def __init__(self) -> None:
        self._collecting_s = self._began_s = 0.0
        gc.callbacks.append(self._collected)

    def close(self) -> None:
        gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, _info: dict[str, Any]) -> None:
        now_s = time.perf_counter()
        if phase == "start":
            self._began_s = now_s
        else:
            self._collecting_s += now_s - self._began_s

    def now(self) -> dict[str, float]:
        """All counts so far."""
        found = {"collecting s": self._collecting_s}
        if torch.cuda.is_available():
            stats = torch.cuda.memory_stats()
            found |= {name: stats.get(key, 0) for name, key in _DRIVER.items()}
        return found


def per_step(before: dict[str, float], after: dict[str, float], steps: int) -> dict[str, float]:
    """Between two calls of ``now``."""
    return {name: (after[name] - before[name]) / steps for name in after}
