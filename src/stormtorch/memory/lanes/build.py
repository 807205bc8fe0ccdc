"""Lanes: ordered queues of work beside compute, with events between them.

A lane takes copies, waits and signals in order and returns at once. Two lanes meet only through events (`record` on
one, `wait` on the other) and flags (32-bit words that a CPU worker sees too). Loads and stores have a lane each,
because one queue for both would serialise the two copy engines of a GPU. The compute lane stands for the stream on
which the caller computes at that moment: it is looked up at each call, since recomputation in backward runs on another
thread.

Three kinds serve one interface:

- `CudaLane` (lanes/cuda.py): a CUDA stream. The host only enqueues.
- `StagedCudaLane` (lanes/staged.py): where host memory could not be page-locked. A thread feeds the stream through
  a small page-locked ring. Slower, same results.
- `ThreadLane` (lanes/thread.py): host memory in the device's role. A worker thread really runs later than its caller,
  so that a missing wait is a wrong number on a machine without a GPU too; tests add delays.

The road not taken: one shared pool of Python threads for all lanes. Each hand-over of the GIL cost more than the copy
it started; with streams and flags the loop has no Python thread at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core.errors import SettingError
from ...core.events import Sink
from ...core.tags import Tag
from ..books.ledger import Ledger
from ..books.limits import usable_device
from ..cuda.clock import CudaClock
from ..cuda.driver import device_index
from ..host.arena import HostArena
from ..host.pinning import page_lock_for
from .cuda import CudaLane, need_driver
from .lane import Delay, Event, Lane
from .staged import RING_BYTES, StagedCudaLane
from .thread import CpuComputeLane, ThreadLane


@dataclass(frozen=True)
class Lanes:
    """The lanes of one device. ``load`` moves towards compute, ``store`` away from it.

    ``aside`` is a second lane towards compute, for copies that need not wait where ``load`` waits: a lane works in
    order, and one that is held back by a flag holds back everything behind it. Where home memory is pageable, ``aside``
    is ``load`` itself. ``ring`` is the page-locked memory through which both go where home memory is pageable; None
    where they need none. ``files`` is one more lane towards compute, for copies that wait for reads of files; None
    where nothing is read: ``from_files`` gives a lane in any case."""

    device: torch.device
    load: Lane
    store: Lane
    compute: Lane
    aside: Lane
    ring: HostArena | None = None
    files: Lane | None = None

    @property
    def from_files(self) -> Lane:
        return self.load if self.files is None else self.files

    @property
    def _all(self) -> tuple[Lane, ...]:
        return self.load, *(() if self.files is None else (self.files,)), self.aside, self.store, self.compute

    def synchronize(self) -> None:
        """Block until all are empty."""
        for lane in self._all:
            lane.synchronize()

    def emit(self) -> None:
        """Tell the sink of all work that is over."""
        for lane in self._all:
            lane.emit()

    def record_all(self) -> tuple[Event, ...]:
        """Events after all work that was queued on any of them."""
        return tuple(lane.record() for lane in self._all)

    def close(self) -> None:
        """Close all lanes. First abort the flags that a lane may wait for, or drain the work that sets them."""
        try:
            self.load.close()
        finally:
            if self.files is not None:
                self.files.close()
            self.aside.close()
            self.store.close()
            if self.ring is not None:
                self.ring.close()


def open_lanes(
    device: torch.device | str,
    *,
    home: HostArena | None = None,
    ledger: Ledger | None = None,
    ring_bytes: int = RING_BYTES,
    sink: Sink | None = None,
    delay: Delay | None = None,
    from_files: bool = False,
) -> Lanes:
    """Lanes for ``device``, with one ``from_files`` if that is asked for and home memory is not staged.

    ``home`` is the arena to copy from and to. If it could not be page-locked for a GPU, the lanes are staged through a
    ring of ``ring_bytes`` that is charged to ``ledger``. Without ``home``, all host memory must be page-locked."""
    device = usable_device(device)
    if device.type == "cpu":
        load, store, aside = (ThreadLane(name, sink, delay) for name in ("load", "store", "aside"))
        files = ThreadLane("files", sink, delay) if from_files else None
        return Lanes(device, load, store, CpuComputeLane(), aside, files=files)
    clock = CudaClock(need_driver(), device_index(device))
    compute = CudaLane("compute", device, clock, own_stream=False)
    if home is None or home.pinned:
        names = ("load", "store", "aside", *(("files",) if from_files else ()))
        cuda = [CudaLane(name, device, clock, own_stream=True, sink=sink, delay=delay) for name in names]
        return Lanes(device, cuda[0], cuda[1], compute, cuda[2], files=cuda[3] if from_files else None)
    if ledger is None:
        raise SettingError(
            "Lanes for a pageable arena need a ring of page-locked memory. Give ledger= to charge it to."
        )
    ring = HostArena(ring_bytes, ledger=ledger, tag=Tag.STAGING, page_lock=page_lock_for(device))
    halves = ring.tensor((2, ring_bytes // 2), torch.uint8)
    staged_load = StagedCudaLane("load", device, halves[0], clock, sink, delay)
    staged_store = StagedCudaLane("store", device, halves[1], clock, sink, delay)
    return Lanes(device, staged_load, staged_store, compute, staged_load, ring)
