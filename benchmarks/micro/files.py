"""Writing and reading a scratch file, direct and through the page cache."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch

from stormtorch.core.sizes import GiB, MiB
from stormtorch.core.tags import Tag
from stormtorch.memory.books.ledger import open_ledger
from stormtorch.memory.disk.scratch import create_scratch
from stormtorch.memory.host.arena import HostArena

from .rows import Row


def run(tiny: bool) -> list[Row]:
    size = 16 * MiB if tiny else 2 * GiB
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=".") as directory:
        ledger = open_ledger(torch.device("cpu"), disk=Path(directory))
        arena = HostArena(size, ledger=ledger, tag=Tag.DATA)
        data = arena.tensor((size,), torch.uint8, alignment=4096)
        data.random_()
        for direct in ("auto", False):
            with create_scratch(directory, size, ledger=ledger, tag=Tag.DATA, direct=direct) as file:
                extent = file.take(size)
                for verb, call in (("write", extent.write), ("read", extent.read)):
                    start_s = time.perf_counter()
                    call(data)
                    if verb == "write":
                        os.fdatasync(file.number)
                    rate = size / (time.perf_counter() - start_s) / 1e9
                    rows.append(Row("files", f"{size // MiB} MiB {verb}, {file.mode}", rate, "GB/s"))
        arena.close()
    return rows
