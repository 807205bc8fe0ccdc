"""What a case gives back, and the kernel's own counts of its process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Figures:
    """``read_bytes``, ``written_bytes``: in a step."""

    parameters: int
    tokens: int  # in a step
    step_s: float
    times: list[float]
    losses: list[float]
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    hidden: float | None = None
    anonymous_bytes: int


def anonymous_bytes() -> int:
    """RAM of this process that is no file's."""
    return _number("status", r"^RssAnon:\s+(\d+)") << 10


def moved_bytes() -> tuple[int, int]:
    """What the process has read from disks and written to them, direct I/O included."""
    return _number("io", r"^read_bytes: (\d+)"), _number("io", r"^write_bytes: (\d+)")


def _number(file: str, pattern: str) -> int:
    found = re.search(pattern, Path("/proc/self", file).read_text(), re.MULTILINE)
    return int(found[1]) if found else 0
