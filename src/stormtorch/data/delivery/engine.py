"""Interfaces: an engine lives as long as its loader; a run is one iteration, which gives its batches in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from ...core.events import Span, What


@dataclass(frozen=True, slots=True)
class BatchRange:
    """The batches from ``batch`` of ``epoch`` up to ``end_epoch``, exclusive. An epoch has ``per_epoch`` batches."""

    epoch: int
    batch: int
    end_epoch: int
    per_epoch: int

    def after(self, epoch: int, batch: int) -> tuple[int, int]:
        """The next batch, as epoch and batch."""
        return (epoch, batch + 1) if batch + 1 < self.per_epoch else (epoch + 1, 0)


@dataclass(slots=True)
class Counts:
    """A sink that keeps a loader's totals, for reports."""

    samples: int = 0
    bytes: int = 0
    waited_s: float = 0.0
    spent_s: float = 0.0  # in runs, each from its first request to its last batch

    def __call__(self, span: Span) -> None:
        if span.what is What.BATCH:
            self.samples += span.times
            self.bytes += span.bytes
            self.spent_s += span.end_s - span.start_s
        elif span.what is What.WAIT:
            self.waited_s += span.end_s - span.start_s


class Run(ABC):
    """Gives batches until there are none; ``close`` may be called at any moment."""

    @abstractmethod
    def next(self) -> tuple[Any, int, int] | None:
        """The next batch, on its device, with its samples and bytes; None after the last. Blocks until it is read."""

    @abstractmethod
    def close(self) -> None:
        """Cancel pending reads and copies; none is running when it returns. Idempotent."""


class Engine(ABC):
    """A loader's threads, files and memory, kept from one loop to the next. Belongs to the process ``pid``."""

    pid: int

    @abstractmethod
    def run(self, span: BatchRange) -> Run:
        """Start reading ``span``. One run at a time: close the last one first."""

    @property
    @abstractmethod
    def depth_batches(self) -> int:
        """Batches to prefetch."""

    @property
    @abstractmethod
    def ring_bytes(self) -> int:
        """Host memory charged to the ledger."""

    @abstractmethod
    def close(self) -> None:
        """End the threads and return everything. Idempotent; does nothing in a forked child."""
