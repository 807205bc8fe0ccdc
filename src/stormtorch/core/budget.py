"""What the user allows on one tier, and why the number is what it is."""

from __future__ import annotations

from dataclasses import dataclass

from .sizes import format_bytes
from .tags import Tier


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A hard limit on one tier.

    ``given`` is how the limit came to be, in the user's own words: ``vram='8GiB'`` or ``vram='auto'``.
    ``reason`` explains an automatic limit with its numbers; empty where the user set it.
    """

    tier: Tier
    limit_bytes: int
    given: str
    reason: str = ""

    def __str__(self) -> str:
        because = f": {self.reason}" if self.reason else ""
        return f"{self.tier.value} {format_bytes(self.limit_bytes)} ({self.given}{because})"
