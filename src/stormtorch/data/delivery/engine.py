"""What the engines share: their settings, a loader's totals with their report, and the search for NaN.

An engine reads batches and brings them to the device. It keeps threads, files and memory from one loop to the next, as
long as its loader lives, and belongs to the process ``pid``. RowsEngine is for rows, ItemEngine for torch's datasets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core.events import Span, What
from ...core.sizes import format_bytes
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


@dataclass(frozen=True, kw_only=True)
class LoaderReport:
    """``seconds``: the time of all loops, user code included; ``waited_s``: the part spent waiting for data.

    ``reading``: how the loader reads, ``reason``: why. ``depth``: batches to prefetch. ``ring_bytes``: RAM charged.
    """

    samples: int
    bytes: int
    seconds: float
    waited_s: float
    reading: str
    reason: str
    depth: int
    ring_bytes: int

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        share = self.waited_s / self.seconds if self.seconds else 0.0
        return "\n".join(
            (
                f"data: {self.samples} samples, {format_bytes(self.bytes)} in {self.seconds:.1f} s: "
                f"{self.samples_per_s:.0f} samples/s, {format_bytes(int(self.bytes_per_s))}/s",
                f"waited for data: {self.waited_s:.2f} s ({share:.1%})",
                f"reading: {self.reading} ({self.reason})",
                f"prefetch: {self.depth} batches; RAM: {format_bytes(self.ring_bytes)}",
            )
        )


def first_nan_row(tensor: torch.Tensor) -> int | None:
    """The first row of a CPU batch that holds a NaN; infinities are allowed. Blocks; one pass over the bytes."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return None
    if not tensor.sum().isnan():  # necessary, not sufficient: inf - inf is NaN too
        return None
    found = tensor.isnan().view(tensor.shape[0], -1).any(dim=1).nonzero()
    return int(found[0]) if len(found) else None
