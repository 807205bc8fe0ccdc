"""Interfaces: an engine lives as long as its loader; a run is one iteration, its batches given in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """Which batches: from ``batch`` of ``epoch`` to before ``end_epoch``. Epochs have ``per_epoch`` batches."""

    epoch: int
    batch: int
    end_epoch: int
    per_epoch: int

    def after(self, epoch: int, batch: int) -> tuple[int, int]:
        """The batch that follows."""
        return (epoch, batch + 1) if batch + 1 < self.per_epoch else (epoch + 1, 0)


@dataclass(slots=True)
class Counts:
    """What a loader did so far: for reports."""

    samples: int = 0
    bytes: int = 0
    waited_s: float = 0.0
    spent_s: float = 0.0  # from the first batch asked for to the last one given, pauses between runs left out


class Run(ABC):
    """Gives batches until there are none; ``close`` may come at any moment."""

    @abstractmethod
    def next(self) -> Any:
        """The next batch, on its device; None after the last. Blocks until it is there."""

    @abstractmethod
    def close(self) -> None:
        """Drop what is on its way. When it returns nothing is written any more. Safe to call twice."""


class Engine(ABC):
    """What a loader keeps from one loop to the next. Belongs to the process ``pid`` that made it."""

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
