"""What reads batches, whichever way: rows at given places of the order, written to given addresses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ...core.errors import OutOfBudget, StormError
from .permutations import Rows


class Read(ABC):
    """One batch on its way into host memory. ``rows`` are its row numbers."""

    rows: Rows

    @abstractmethod
    def ready(self) -> bool:
        """Whether it is all there. Does not block, and moves on what waits for nothing but us."""

    @abstractmethod
    def wait(self) -> None:
        """Block until it is all there. Raises StormError with the file and the row if it never will be."""


class FailedRead(Read):
    """A batch whose read could not even begin. It fails when it is wanted: those before it are still good."""

    def __init__(self, rows: Rows, error: StormError) -> None:
        self.rows, self._error = rows, error

    def ready(self) -> bool:
        return False

    def wait(self) -> None:
        raise self._error


class Reader(ABC):
    """Reads batches in the order of the epochs. For one thread at a time."""

    mode: str
    reason: str
    refused: OutOfBudget | None = None  # why the last ``start`` that gave None must wait, if it is for memory

    @abstractmethod
    def stop(self) -> None:
        """Drop all reads that were started. When it returns nothing writes to their targets any more."""

    @abstractmethod
    def restart(self, epoch: int, first: int) -> None:
        """``stop``, then expect the next read to be at place ``first`` of ``epoch``."""

    @abstractmethod
    def start(self, epoch: int, first: int, count: int, targets: Sequence[int], keep: object) -> Read | None:
        """Begin to read the rows at places ``first`` to ``first + count``; None if that must wait for earlier reads.

        Batches are started in the order of the epochs. ``targets`` is an address for each field, where the rows go one
        after the other; ``keep`` is what keeps that memory.
        """

    @abstractmethod
    def close(self) -> None:
        """Drop all reads, end the threads, return the memory. Safe to call twice."""
