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

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..core.records import Sink
from ..core.tags import Tag
from .flags import Flag

Delay = Callable[[], None]
"""Called inside a lane before each piece of its work; tests sleep in it, on the thread or on the stream."""


class Event(ABC):
    """A point in a lane's order."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all work before the point has finished. Does not block."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until it has. Raises LaneError if that work failed."""


class Lane(ABC):
    """An ordered queue.

    All methods return at once unless they say otherwise; tensors must stay alive until the work is done.
    """

    name: str

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, tag: Tag) -> None:
        """Copy between contiguous tensors of the same dtype and number of elements."""

    @abstractmethod
    def fill(self, target: torch.Tensor, byte: int) -> None:
        """Set every byte of a contiguous ``target``; 0xFF makes NaN in every floating dtype."""

    @abstractmethod
    def record(self) -> Event:
        """The point after everything queued so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Hold back all later work of this lane until ``event``."""

    @abstractmethod
    def write_flag(self, flag: Flag, value: int) -> None:
        """Store ``value`` in ``flag`` once everything queued so far is done and visible to the CPU."""

    @abstractmethod
    def wait_flag(self, flag: Flag, value: int) -> None:
        """Hold back all later work of this lane until ``flag`` has reached ``value``."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until the lane is empty; raises LaneError if any of its work failed."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is queued, then end the lane. Safe to call twice; does not raise for work that failed."""

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], tag: Tag) -> int:
        """Copy every (target, source) pair, neighbours in one go; returns the number of copies that took."""
        merged = coalesce(pairs)
        for target, source in merged:
            self.copy(target, source, tag)
        return len(merged)


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
        self.load.close()
        self.store.close()


def open_lanes(
    device: torch.device, *, staging: torch.Tensor | None = None, sink: Sink | None = None, delay: Delay | None = None
) -> Lanes:
    """Lanes for ``device``.

    ``staging`` is a page-locked ring; give it where the host memory to copy is not page-locked itself.
    """
    if device.type == "cpu":
        from .cpu_lanes import CpuComputeLane, CpuLane

        return Lanes(device, CpuLane("load", sink, delay), CpuLane("store", sink, delay), CpuComputeLane())
    from .cuda_lanes import CudaLane

    compute = CudaLane("compute", device, None)
    if staging is None:
        load, store = (CudaLane(name, device, torch.cuda.Stream(device), sink, delay) for name in ("load", "store"))
        return Lanes(device, load, store, compute)
    from .staged_lanes import StagedCudaLane

    half = staging.numel() // 2
    return Lanes(
        device,
        StagedCudaLane("load", device, staging[:half], sink, delay),
        StagedCudaLane("store", device, staging[half:], sink, delay),
        compute,
    )


def check_copy(target: torch.Tensor, source: torch.Tensor) -> int:
    """Assert that a lane can copy ``source`` to ``target``; returns the bytes.

    Casts and strides are compute, not transport.
    """
    assert target.dtype == source.dtype, f"a lane does not cast {source.dtype} to {target.dtype}"
    assert target.numel() == source.numel(), f"{source.numel()} elements into {target.numel()}"
    assert target.is_contiguous(), "the target of a lane's copy must be contiguous"
    assert source.is_contiguous(), "the source of a lane's copy must be contiguous"
    return source.nbytes


def coalesce(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same copies in as few pieces as adjacency allows: neighbours on both sides become one pair of byte tensors.

    Pairs are merged with their predecessor only, which suffices because units lay their tensors out in one order.
    """
    merged: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target, source in pairs:
        if check_copy(target, source) == 0:
            continue
        pair = (_as_bytes(target), _as_bytes(source))
        if merged and all(_follows(last, new) for last, new in zip(merged[-1], pair, strict=True)):
            grown = [_grow(last, new.numel()) for last, new in zip(merged[-1], pair, strict=True)]
            merged[-1] = (grown[0], grown[1])
        else:
            merged.append(pair)
    return merged


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _follows(last: torch.Tensor, new: torch.Tensor) -> bool:
    same_storage = last.untyped_storage().data_ptr() == new.untyped_storage().data_ptr()
    return same_storage and last.data_ptr() + last.numel() == new.data_ptr()


def _grow(last: torch.Tensor, extra: int) -> torch.Tensor:
    return last.as_strided((last.numel() + extra,), (1,))
