"""A user's limit on one tier, and the reason for its number."""

from __future__ import annotations

from dataclasses import dataclass

from .tags import Tier


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A hard limit on one tier. ``given`` shows where the limit comes from, as the user wrote it: ``vram='8GiB'`` or
    ``vram='auto'``. ``reason`` explains an automatic limit with its numbers; empty where the user set it."""

    tier: Tier
    limit_bytes: int
    given: str
    reason: str = ""
