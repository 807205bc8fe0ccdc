"""Who watches a run: the command shows it on a terminal, a test collects it. Training only tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Status:
    """Where a run stands. ``loss`` is that of the last step whose result has arrived."""

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
        """Something that the user should read."""

    def warn(self, line: str) -> None:
        """Something that went wrong and does not end the run."""

    def reading(self, total_bytes: int) -> Callable[[int], None]:
        """Text of that many bytes is about to be read; what is returned is told of each piece."""

    def show(self, status: Status) -> None:
        """After every step; ``log`` says which of them deserve a line."""

    def log(self, status: Status) -> None:
        """A step whose numbers were written to the metrics."""
