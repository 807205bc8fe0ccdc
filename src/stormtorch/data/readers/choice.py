"""Chooses how to read a source: from the page cache if it fits there, else in windows with direct I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...core.errors import SettingError
from ...core.sizes import GiB, format_bytes
from ...memory.books import limits
from ..source import DecodedSource, FileSource

Reading = Literal["auto", "cached", "direct"]


@dataclass(frozen=True, slots=True)
class Choice:
    """How a source is read, and the reason. ``processes``: torch's own loader reads it, not a reader."""

    mode: Literal["cached", "direct", "decoded", "processes"]
    reason: str


def choose(source: FileSource | DecodedSource, reading: Reading) -> Choice:
    """How to read ``source``, by its size and the free RAM."""
    if reading not in ("auto", "cached", "direct"):
        raise SettingError(f"reading={reading!r} is not accepted. Accepted: 'auto', 'cached', 'direct'.")
    if isinstance(source, DecodedSource):
        return Choice("decoded", "rows must be decoded")
    if reading != "auto":
        return Choice(reading, f"reading={reading!r}")
    size = source.rows * source.row_bytes
    free, total = limits.host_available_bytes(), limits.host_total_bytes()
    kept = min(max(2 * GiB, total // 10), free // 2)
    numbers = f"{format_bytes(size)} of data, {format_bytes(free)} of RAM free, {format_bytes(kept)} kept for others"
    return Choice("cached" if size <= free - kept else "direct", numbers)
