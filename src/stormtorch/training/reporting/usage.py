"""The resources that a run used: a line for the user, and the last record of the metrics."""

from __future__ import annotations

import re
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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
