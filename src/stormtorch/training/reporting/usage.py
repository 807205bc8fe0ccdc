"""The resources that a run used: a few lines for the user, and the last record of the metrics."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...core.sizes import format_bytes
from ...core.tags import Tier
from ...session.api import Session


class Spent(NamedTuple):
    """The time and bytes of reading or writing."""

    seconds: float
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s ({format_bytes(self.size_bytes)})"

    def as_record(self) -> dict[str, Any]:
        return {"seconds": round(self.seconds, 3), "bytes": self.size_bytes}


@dataclass
class Times:
    """The cost of loading, resuming and saving."""

    load: Spent | None = None
    resume: Spent | None = None
    saves: list[Spent] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"{name} {spent}" for name, spent in (("load", self.load), ("resume", self.resume)) if spent]
        if self.saves:
            parts.append(f"last of {len(self.saves)} saves {self.saves[-1]}")
        return "; ".join(parts) or "nothing was loaded or saved"


def peaks(session: Session) -> dict[str, int]:
    """The peak memory of this process: RAM and device."""
    device = session.device
    held = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "peak_rss_bytes": peak_rss_bytes(),
        "peak_vram_bytes": max(session.ledger.peak_bytes(Tier.DEVICE), held),
    }


def peak_rss_bytes() -> int:
    """VmHWM, which includes mapped pages of files; where there is none, `getrusage`, which includes our parent."""
    found = re.search(r"^VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(errors="replace"), re.MULTILINE)
    return (int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
