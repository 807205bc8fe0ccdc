"""The pace of a run, from its last steps, and the resources that it used."""

from __future__ import annotations

import contextlib
import re
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ...core.sizes import format_bytes
from ...core.tags import Tier
from ...session.api import Session

_FIRST = 5  # slower steps: torch allocates memory and chooses kernels


class Pace:
    """Measures the time of steps, without the pauses between them."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter, window: int = 50) -> None:
        self._clock = clock
        self._paused_s = 0.0
        self._ends: deque[float] = deque([clock()], maxlen=window + 1)
        self._steady_s = 0.0  # when the last of the first steps ended
        self.steps = 0

    def step_ended(self) -> None:
        self._ends.append(self._clock() - self._paused_s)
        self.steps += 1
        if self.steps == _FIRST:
            self._steady_s = self._ends[-1]

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the block from the pace: evaluation, samples, saving."""
        began = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - began

    @property
    def step_s(self) -> float | None:
        """Seconds per step, over the last steps; None before the first."""
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) if len(self._ends) > 1 else None

    @property
    def mean_step_s(self) -> float | None:
        """Seconds per step, over all but the first steps; None before those."""
        return (self._ends[-1] - self._steady_s) / (self.steps - _FIRST) if self.steps > _FIRST else None


class Spent(NamedTuple):
    """The time and bytes of reading or writing."""

    seconds: float
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s ({format_bytes(self.size_bytes)})"


def describe_usage(spent: Mapping[str, Sequence[Spent]]) -> str:
    """The peak of RAM, and the cost of loading, resuming and saving."""
    parts = [f"{kind} {spent[kind][-1]}" for kind in ("load", "resume") if kind in spent]
    if "save" in spent:
        parts.append(f"last of {len(spent['save'])} saves {spent['save'][-1]}")
    times = "; ".join(parts) or "nothing was loaded or saved"
    return f"process: peak RAM {format_bytes(_peak_rss_bytes())}; {times}"


def peaks(session: Session) -> dict[str, int]:
    """The peak memory of this process: RAM and device."""
    device = session.device
    held = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "peak_rss_bytes": _peak_rss_bytes(),
        "peak_vram_bytes": max(session.ledger.peak_bytes(Tier.DEVICE), held),
    }


def _peak_rss_bytes() -> int:
    """VmHWM, which includes mapped pages of files; where there is none, `getrusage`, which includes our parent."""
    found = re.search(r"^VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(errors="replace"), re.MULTILINE)
    return (int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
