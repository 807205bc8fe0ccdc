"""The link, each way and both ways at once: copies through lanes against plain copies of torch's own pinned memory.

Without a GPU the device is host memory and the figures are those of memcpy on a worker thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from stormtorch.core.sizes import MiB
from stormtorch.core.tags import Tag
from stormtorch.memory.books.ledger import open_ledger
from stormtorch.memory.host.arena import HostArena
from stormtorch.memory.host.pinning import page_lock_for
from stormtorch.memory.lanes.build import open_lanes

from .rows import Row


def run(tiny: bool) -> list[Row]:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    sizes = [1, 4] if tiny else [1, 16, 64, 256, 1024] if gpu else [16, 64, 256]
    rows: list[Row] = []
    for mib in sizes:
        size = mib * MiB
        repeat = 2 if tiny else max(4, min(64, 2048 // mib))
        arena = HostArena(2 * size, ledger=open_ledger(device), tag=Tag.DATA, page_lock=page_lock_for(device))
        up, down = (arena.tensor((size,), torch.uint8) for _ in range(2))
        pinned = [torch.ones(size, dtype=torch.uint8, pin_memory=gpu) for _ in range(2)]
        ours, plain, plain_there = _ours(device, up, down), _plain(device, *pinned), _plain(device, up, down)
        for way in ("load", "store", "both"):
            # In turns, so that a machine that slows down does so for both.
            rounds = [
                [_rate(copies[way], size, repeat) for copies in (ours, plain, plain_there)]
                for _ in range(2 if tiny else 7)
            ]
            us, them, there = (statistics.median(column) for column in zip(*rounds, strict=True))
            label = f"{mib} MiB {way}" + (", each" if way == "both" else "")
            rows.append(Row("link", label, us, "GB/s", them, "pin_memory, copy_(non_blocking)" if gpu else "copy_"))
            if gpu and mib >= 256:
                # Tells the lane's own cost from that of where the arena lies in RAM.
                rows.append(Row("link", f"{label}, same memory", us, "GB/s", there, "copy_ on the arena's memory"))
    return rows


Copies = Callable[[int], None]


def _rate(copies: Copies, size: int, repeat: int) -> float:
    copies(1)
    start_s = time.perf_counter()
    copies(repeat)
    return size * repeat / (time.perf_counter() - start_s) / 1e9


def _ours(device: torch.device, up: torch.Tensor, down: torch.Tensor) -> dict[str, Copies]:
    there, here = (torch.ones_like(up, device=device) for _ in range(2))
    lanes = open_lanes(device)

    def copies(load: bool, store: bool) -> Copies:
        def run(repeat: int) -> None:
            for _ in range(repeat):
                if load:
                    lanes.load.copy(there, up, Tag.DATA)
                if store:
                    lanes.store.copy(down, here, Tag.DATA)
            lanes.synchronize()

        return run

    return {"load": copies(True, False), "store": copies(False, True), "both": copies(True, True)}


def _plain(device: torch.device, up: torch.Tensor, down: torch.Tensor) -> dict[str, Copies]:
    gpu = device.type == "cuda"
    there, here = (torch.ones_like(up, device=device) for _ in range(2))
    streams = [torch.cuda.Stream() for _ in range(2)] if gpu else []

    def on(index: int) -> AbstractContextManager[None]:
        return torch.cuda.stream(streams[index]) if gpu else nullcontext()

    def copies(load: bool, store: bool) -> Copies:
        def run(repeat: int) -> None:
            for _ in range(repeat):
                if load:
                    with on(0):
                        there.copy_(up, non_blocking=True)
                if store:
                    with on(1):
                        down.copy_(here, non_blocking=True)
            if gpu:
                torch.cuda.synchronize()

        return run

    return {"load": copies(True, False), "store": copies(False, True), "both": copies(True, True)}
