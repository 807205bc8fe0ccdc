"""Law: two hundred times everything opened and closed leaves threads, descriptors, memory and ledger as they were."""

from __future__ import annotations

import gc
import operator
import threading
import time
from pathlib import Path

import psutil
import torch

from stormtorch.core.sizes import MiB
from stormtorch.core.tags import Tag
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.disk.scratch import create_scratch
from stormtorch.memory.host.arena import HostArena
from stormtorch.memory.host.pinning import page_lock_for
from stormtorch.memory.lanes.build import open_lanes
from stormtorch.memory.lanes.flags import Flags
from stormtorch.memory.pools.pool import DevicePool
from stormtorch.native.worker.open import open_worker

from ..resident import resident_bytes


def session(device: torch.device, ledger: Ledger, directory: Path) -> None:
    lock = page_lock_for(device)
    arena = HostArena(MiB, ledger=ledger, tag=Tag.PARAMETERS, page_lock=lock)
    lanes = open_lanes(device)
    pool = DevicePool(device, ledger=ledger, tag=Tag.PARAMETERS, lanes=lanes)
    pool.grow(2 * MiB)
    flags = Flags(4, ledger=ledger, device=device, page_lock=lock)
    home = arena.tensor((MiB,), torch.uint8, alignment=4096)
    piece = pool.take(MiB, lanes.load)
    assert piece is not None
    lanes.load.copy(piece.bytes, home, Tag.PARAMETERS)
    pool.give(piece, lanes.load.record())
    with open_worker(threads=1), create_scratch(directory, MiB, ledger=ledger, tag=Tag.OPTIMIZER) as file:
        extent = file.take(MiB)
        extent.write(home)
        extent.read(home)
    pool.close()
    lanes.close()
    flags.close()
    arena.close()


def test_two_hundred_sessions_leave_nothing(device: torch.device, ledger: Ledger, tmp_path: Path) -> None:
    def standing() -> tuple[int, int, int]:
        gc.collect()
        return threading.active_count(), psutil.Process().num_threads(), len(list(Path("/proc/self/fd").iterdir()))

    for _ in range(20):  # pools that torch, the driver and malloc make once
        session(device, ledger, tmp_path)
    before, rss = standing(), resident_bytes()
    for _ in range(200):
        session(device, ledger, tmp_path)
    deadline = time.monotonic() + 10  # the kernel counts a joined thread for a moment, longer on a busy machine
    while any(map(operator.gt, now := standing(), before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(operator.gt, now, before)), (now, before)
    grown = resident_bytes() - rss
    limit = (16 if device.type == "cpu" else 32) * MiB  # the driver takes some of its own
    assert grown < limit, f"{grown / MiB:.0f} MiB more after 200 sessions that used 2 MiB each"
    assert list(tmp_path.iterdir()) == []
