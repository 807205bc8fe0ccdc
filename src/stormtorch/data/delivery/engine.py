"""The interface of engines: an engine reads batches and brings them to the device, and lives as long as its loader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from ...core.events import Span, What
from ..readers.order import Order


@dataclass(slots=True)
class Counts:
    """A sink that keeps a loader's totals, for reports."""

    samples: int = 0
    bytes: int = 0
    seconds: float = 0.0  # in loops, each from its first request to its last batch
    waited_s: float = 0.0

    def __call__(self, span: Span) -> None:
        if span.what is What.BATCH:
            self.samples += span.times
            self.bytes += span.bytes
            self.seconds += span.seconds
        elif span.what is What.WAIT:
            self.waited_s += span.seconds


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The loader's settings, as both engines need them. ``workers``: None for the engine's own choice.

    An epoch has ``per_epoch`` batches. A batch's number counts through all epochs."""

    order: Order
    device: torch.device
    batch_rows: int
    per_epoch: int
    workers: int | None
    refuses_nan: bool
    counts: Counts


class Engine(ABC):
    """A loader's threads, files and memory, kept from one loop to the next. Belongs to the process ``pid``."""

    pid: int

    @abstractmethod
    def start(self, begin: int, end: int) -> None:
        """Start reading the batches from ``begin`` up to ``end``. Nothing else is being read: ``stop`` comes first."""

    @abstractmethod
    def next(self) -> tuple[Any, int, int] | None:
        """The next batch, on its device, with its samples and bytes; None after the last. Blocks until it is read."""

    @abstractmethod
    def stop(self) -> None:
        """Cancel pending reads and copies; none is running when it returns. Idempotent."""

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


def first_nan_row(tensor: torch.Tensor) -> int | None:
    """The first row of a CPU batch that holds a NaN; infinities are allowed. Blocks; one pass over the bytes."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return None
    if not tensor.sum().isnan():  # necessary, not sufficient: inf - inf is NaN too
        return None
    found = tensor.isnan().view(tensor.shape[0], -1).any(dim=1).nonzero()
    return int(found[0]) if len(found) else None
