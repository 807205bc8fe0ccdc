"""What a loader keeps from one loop to the next, whatever its source."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .run import Run, Span


class Engine(ABC):
    """Belongs to the process ``pid`` that made it."""

    pid: int

    @abstractmethod
    def run(self, span: Span) -> Run:
        """Begin to read what ``span`` says. One run at a time: close the last one first."""

    @property
    @abstractmethod
    def depth_batches(self) -> int:
        """Batches that are read ahead."""

    @property
    @abstractmethod
    def ring_bytes(self) -> int:
        """Host memory that is charged."""

    @abstractmethod
    def close(self) -> None:
        """End the threads, return everything. Safe to call twice; does nothing in a forked child."""
