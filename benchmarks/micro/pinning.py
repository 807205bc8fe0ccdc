"""How fast page-locked memory is made: our arena against ``pin_memory=True``.

Without a GPU: mapping and touching alone.
"""

from __future__ import annotations

import time

import torch

from stormtorch.core.sizes import GiB, MiB
from stormtorch.core.tags import Tag
from stormtorch.memory.books.ledger import open_ledger
from stormtorch.memory.host.arena import HostArena
from stormtorch.memory.host.pinning import page_lock_for

from .rows import Row


def run(tiny: bool) -> list[Row]:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    size = 64 * MiB if tiny else 8 * GiB if gpu else 2 * GiB
    if gpu:
        torch.ones(1, device=device).cpu()  # the context exists before the clock runs
    ledger = open_ledger(device)
    label = f"{size // MiB} MiB"
    # In a virtual machine the first touch of memory may be the host's too; no measurement here includes it.
    torch.empty(size, dtype=torch.uint8).fill_(1)

    start_s = time.perf_counter()
    arena = HostArena(size, ledger=ledger, tag=Tag.DATA, page_lock=page_lock_for(device))
    ours = size / (time.perf_counter() - start_s) / 1e9
    assert arena.pinned == gpu
    arena.close()

    start_s = time.perf_counter()
    if gpu:
        plain = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    else:
        plain = torch.empty(size, dtype=torch.uint8)
        plain.zero_()
    theirs = size / (time.perf_counter() - start_s) / 1e9
    del plain
    return [Row("pinning", label, ours, "GB/s", theirs, "pin_memory=True" if gpu else "empty + zero_")]
