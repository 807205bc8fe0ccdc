"""Interfaces of readers: they read the rows at given places of the order to given addresses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ...core.errors import OutOfBudget
from .permutations import Rows


class Read(ABC):
    """One batch that is being read into host memory. ``rows``: its row numbers."""

    rows: Rows

    @abstractmethod
    def ready(self) -> bool:
        """Whether it is complete. Does not block; submits work that is ready."""

    @abstractmethod
    def wait(self) -> None:
        """Block until it is complete. Raises StormError, with the file and the row, if it failed."""


class Reader(ABC):
    """Reads batches in the order of the epochs. For one thread at a time."""

    refused: OutOfBudget | None = None  # the reason of the last ``start`` that gave None, if it was memory

    @abstractmethod
    def stop(self) -> None:
        """Cancel all reads. When it returns, nothing writes to their targets any more."""

    @abstractmethod
    def restart(self, epoch: int, first: int) -> None:
        """``stop``, then expect the next read to be at place ``first`` of ``epoch``."""

    @abstractmethod
    def start(self, epoch: int, first: int, count: int, targets: Sequence[int], keep: object) -> Read | None:
        """Start to read the rows at places ``first`` to ``first + count``; None if that must wait for earlier reads.

        The caller starts batches in the order of the epochs. ``targets``: an address for each field, where the rows go
        one after another. ``keep``: an object that keeps this memory alive.
        """

    @abstractmethod
    def close(self) -> None:
        """Cancel all reads, end the threads, return the memory. Idempotent."""
