"""What a run needed, when it is over: for the user in a few lines, for programs in the last record of the metrics."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..api import Session
from ..core.sizes import format_bytes
from ..core.tags import Tier


@dataclass
class Times:
    """Seconds and bytes of what is no step; noted by whoever does it."""

    load: tuple[float, int] | None = None
    resume: tuple[float, int] | None = None
    saves: list[tuple[float, int]] = field(default_factory=list)

    def __str__(self) -> str:
        parts = []
        if self.load is not None:
            parts.append(f"load {_spent(*self.load)}")
        if self.resume is not None:
            parts.append(f"resume {_spent(*self.resume)}")
        if self.saves:
            parts.append(f"last of {len(self.saves)} saves {_spent(*self.saves[-1])}")
        return "; ".join(parts) or "nothing was loaded or saved"


def as_record(seconds: float, size: int) -> dict[str, Any]:
    return {"seconds": round(seconds, 3), "bytes": size}


def peaks(session: Session) -> dict[str, int]:
    """The most memory that this process has had: all of its RAM, and the device's."""
    device = session.device
    held = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "peak_rss_bytes": peak_rss_bytes(),
        "peak_vram_bytes": max(session.ledger.peak_bytes(Tier.DEVICE), held),
    }


def peak_rss_bytes() -> int:
    """VmHWM, pages of files that are mapped included. `getrusage` would count those of the process that started us."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _spent(seconds: float, size: int) -> str:
    return f"{seconds:.1f} s ({format_bytes(size)})"
