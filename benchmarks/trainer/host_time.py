"""What took the host's time during some steps, besides launching kernels: Python's garbage collections, calls of
torch's allocator to the driver, during which the device stands still, and waiting for a core. Beside it, the time that
threads ran: forward is in the main one, backward in another."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch

_TASKS = Path("/proc/self/task")
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
        return found | _threads()


def _threads() -> dict[str, float]:
    """By name of thread, how long all threads of that name have run; and how long all have waited for a core. Linux
    counts both; elsewhere nothing is found."""
    found = {"waiting for a core s": 0.0}
    for task in _TASKS.glob("*"):
        try:
            name, times = (task / "comm").read_text().strip(), (task / "schedstat").read_text().split()
        except OSError:  # it has ended, or the kernel does not count
            continue
        found[f"{name} s"] = found.get(f"{name} s", 0.0) + int(times[0]) / 1e9
        found["waiting for a core s"] += int(times[1]) / 1e9
    return found


def per_step(before: dict[str, float], after: dict[str, float], steps: int) -> dict[str, float]:
    """Between two calls of ``now``."""
    return {name: (after[name] - before.get(name, 0)) / steps for name in after}
