"""Lanes: ordered queues of work beside compute, one each way, with events between them.

A lane takes copies, waits and signals in order and returns at once. Two lanes meet only through events (`record` on
one, `wait` on the other) and flags (32-bit words that a CPU worker sees too). Loads and stores have a lane each,
because one queue for both would serialise the two copy engines of a GPU. The compute lane stands for whatever stream
the caller is computing on at that moment: it is looked up at each call, since recomputation in backward runs on another
thread.

Three kinds serve one interface:

- `CudaLane` (cuda_lanes.py): a CUDA stream. The host only enqueues.
- `StagedCudaLane` (staged_lanes.py): where host memory could not be page-locked, or the driver cannot wait for flags. A
  thread feeds the stream through a small page-locked ring. Slower, same results.
- `CpuLane` (cpu_lanes.py): host memory in the device's role. A worker thread really runs later than its caller, so that
  a missing wait is a wrong number on a machine without a GPU too; tests add delays.

The road not taken: one shared pool of Python threads for all lanes. Each hand-over of the GIL cost more than the copy
it started; with streams and flags the loop has no Python thread at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.records import Sink
from .cpu_lanes import CpuComputeLane, CpuLane
from .cuda_lanes import CudaLane
from .lane import Delay, Lane
from .limits import usable_device
from .staged_lanes import StagedCudaLane


@dataclass(frozen=True)
class Lanes:
    """The lanes of one device. ``load`` moves towards compute, ``store`` away from it."""

    device: torch.device
    load: Lane
    store: Lane
    compute: Lane

    def synchronize(self) -> None:
        """Block until all three are empty."""
        for lane in (self.load, self.store, self.compute):
            lane.synchronize()

    def close(self) -> None:
        """Close both ways. Abort the flags that a lane may wait for first, or drain what leads to them."""
        try:
            self.load.close()
        finally:
            self.store.close()


def open_lanes(
    device: torch.device | str,
    *,
    staging: torch.Tensor | None = None,
    sink: Sink | None = None,
    delay: Delay | None = None,
) -> Lanes:
    """Lanes for ``device``.

    ``staging`` is a page-locked ring; give it where the host memory to copy is not page-locked itself.
    """
    device = usable_device(device)
    if device.type == "cpu":
        return Lanes(device, CpuLane("load", sink, delay), CpuLane("store", sink, delay), CpuComputeLane())
    compute = CudaLane("compute", device, own_stream=False)
    if staging is None:
        load, store = (CudaLane(name, device, own_stream=True, sink=sink, delay=delay) for name in ("load", "store"))
        return Lanes(device, load, store, compute)
    half = staging.numel() // 2
    return Lanes(
        device,
        StagedCudaLane("load", device, staging[:half], sink, delay),
        StagedCudaLane("store", device, staging[half:], sink, delay),
        compute,
    )
