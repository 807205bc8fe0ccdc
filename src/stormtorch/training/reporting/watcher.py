"""The observer of a run: the command line shows its events on a terminal, tests collect them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Status:
    """The progress of a run. ``loss``: of the last step whose result has arrived."""

    step: int
    total: int
    loss: float | None
    tokens_per_s: float | None
    left_s: float | None
    vram_bytes: int
    vram_limit_bytes: int
    ram_bytes: int
    ram_limit_bytes: int
    on_gpu: bool = True  # the CPU device has no VRAM


class Watcher(Protocol):
    def say(self, line: str) -> None:
        """Show a line to the user."""

    def warn(self, line: str) -> None:
        """Report an error that does not end the run."""

    def reading(self, total_bytes: int) -> Callable[[int], None]:
        """Called before text of that many bytes is read; returns a function to call with the bytes of each piece."""

    def show(self, status: Status) -> None:
        """Called after every step; ``log`` is called for those that deserve a line."""

    def log(self, status: Status) -> None:
        """Called for a step whose numbers were written to the metrics."""
