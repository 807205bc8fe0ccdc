"""The report of a loader, as numbers and as text."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.sizes import format_bytes


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
