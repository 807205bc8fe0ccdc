"""``storm demo``: the tiers at work.

Data larger than its device budget goes through slots and back, then to disk and back.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..memory.host import HostArena
    from ..memory.ledger import Ledger

_SLOTS = 4  # one being loaded, one computed on, one stored, one between them
_FACTOR, _SHIFT = 3, 1  # what the device does to each number; exact in integers, so every one can be checked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda:0, ... (default: the GPU if there is one)")
    parser.add_argument("--size", default="auto", help="bytes of data (default: 4GiB with a GPU, 512MiB without)")
    parser.add_argument("--vram", default="auto", help="device budget (default: an eighth of the data)")
    parser.add_argument("--disk", type=Path, help="directory for a scratch file (default: the one for temporary files)")


def run(options: argparse.Namespace) -> int:
    import torch

    from ..core.errors import SettingError
    from ..core.sizes import GiB, MiB, format_bytes, parse_bytes, round_up
    from ..core.tags import Tag
    from ..memory import limits
    from ..memory.host import HostArena
    from ..memory.ledger import open_ledger
    from ..memory.page_lock import page_lock_for
    from ..native.library import describe

    gpu = torch.cuda.is_available()
    device = limits.usable_device(("cuda" if gpu else "cpu") if options.device == "auto" else options.device)
    disk = options.disk or Path(tempfile.gettempdir())
    if not disk.is_dir():
        raise SettingError(f"--disk {disk} is not a directory. Name one that exists.")
    default = 4 * GiB if device.type == "cuda" else 512 * MiB
    size = round_up(default if options.size == "auto" else parse_bytes(options.size, setting="--size"), MiB)
    if not 0 < size <= limits.host_available_bytes():
        raise SettingError(
            f"--size {options.size} cannot be used: it needs more than 0 and at most the "
            f"{format_bytes(limits.host_available_bytes())} of RAM that are free. Give another --size."
        )
    free, _ = limits.device_memory_bytes(device)
    vram = min(size // 8, free // 2) if options.vram == "auto" else parse_bytes(options.vram, setting="--vram")
    if vram < _SLOTS * 4096:
        raise SettingError(
            f"--vram {options.vram} is too little for {_SLOTS} slots. Give at least {_SLOTS * 4096} bytes."
        )
    ledger = open_ledger(device, vram=vram, disk=disk)
    print(f"{device}: {describe()}")

    start_s = time.perf_counter()
    arena = HostArena(size, ledger=ledger, tag=Tag.DATA, page_lock=page_lock_for(device))
    seconds = time.perf_counter() - start_s
    how = "page-locked" if arena.pinned else "pageable"
    print(f"home     {format_bytes(size)} of RAM, {how}, made in {seconds:.2f} s ({size / seconds / 1e9:.1f} GB/s)")
    try:
        _through_the_device(device, arena, ledger)
        _through_the_disk(disk, arena, ledger)
        print()
        print(ledger.table())
    finally:
        arena.close()
    return 0


def _through_the_device(device: torch.device, arena: HostArena, ledger: Ledger) -> None:
    """Stream the arena through slots that hold a fraction of it; change every number there, check them at home."""
    import torch

    from ..core.records import Copied, Record
    from ..core.sizes import format_bytes, round_down
    from ..core.tags import Tag, Tier
    from ..memory.device import SlotRing
    from ..memory.lanes import open_lanes

    records: list[Record] = []
    lanes = open_lanes(device, home=arena, ledger=ledger, sink=records.append)
    slot_bytes = round_down(ledger.free_bytes(Tier.DEVICE) // _SLOTS, 512)
    ring = SlotRing(device, count=_SLOTS, slot_bytes=slot_bytes, ledger=ledger, tag=Tag.DATA, compute=lanes.compute)
    block = arena.allocate(arena.capacity_bytes)
    home = block.tensor(torch.int64)
    torch.arange(home.numel(), out=home, device="cpu")
    start_s = time.perf_counter()
    try:
        for part in home.split(slot_bytes // 8):
            slot = ring.acquire(lanes.load)
            assert slot is not None, "every slot is released below, so one is always free"
            there = slot.tensor(torch.int64, part.shape)
            lanes.load.copy(there, part, Tag.DATA)
            lanes.compute.wait(lanes.load.record())
            there.mul_(_FACTOR).add_(_SHIFT)
            lanes.store.wait(lanes.compute.record())
            lanes.store.copy(part, there, Tag.DATA)
            slot.release(lanes.store.record())
        lanes.synchronize()
        seconds = time.perf_counter() - start_s
    finally:  # before the arena goes, whose memory the lanes may still be copying
        lanes.close()
        ring.close()
    _check(home)
    block.release()
    rates = []
    for lane in ("load", "store"):
        copies = [record for record in records if isinstance(record, Copied) and record.lane == lane]
        rates.append(
            f"{lane}s {sum(c.bytes for c in copies) / max(sum(c.seconds for c in copies), 1e-9) / 1e9:.1f} GB/s"
        )
    print(
        f"device   {format_bytes(home.nbytes)} through {_SLOTS} slots of {format_bytes(slot_bytes)} and back "
        f"in {seconds:.2f} s: {home.nbytes / seconds / 1e9:.1f} GB/s each way ({', '.join(rates)}); all numbers right"
    )


def _through_the_disk(directory: Path, arena: HostArena, ledger: Ledger) -> None:
    """Write the arena to a scratch file and read it back over itself, with direct I/O where the filesystem has it."""
    import torch

    from ..core.sizes import format_bytes
    from ..core.tags import Tag
    from ..memory.scratch_file import create_scratch

    block = arena.allocate(arena.capacity_bytes, alignment=4096)
    home = block.tensor(torch.int64)
    torch.arange(home.numel(), out=home, device="cpu").mul_(_FACTOR).add_(_SHIFT)
    with create_scratch(directory, home.nbytes, ledger=ledger, tag=Tag.DATA) as file:
        extent = file.take(home.nbytes)
        start_s = time.perf_counter()
        extent.write(home)
        written_s = time.perf_counter()
        home.zero_()
        zeroed_s = time.perf_counter()
        extent.read(home)
        read_s = time.perf_counter()
        mode = f"{file.mode} I/O, {file.mode_reason}"
    _check(home)
    write_rate, read_rate = home.nbytes / (written_s - start_s) / 1e9, home.nbytes / (read_s - zeroed_s) / 1e9
    print(
        f"disk     {format_bytes(home.nbytes)} to a scratch file at {write_rate:.1f} GB/s and back "
        f"at {read_rate:.1f} GB/s ({mode}); all numbers right"
    )
    block.release()


def _check(home: torch.Tensor) -> None:
    """Raise unless every number is what it must be; in pieces, so that the check needs little memory."""
    import torch

    from ..core.errors import StormError

    wrong = 0
    for start in range(0, home.numel(), 1 << 22):
        part = home[start : start + (1 << 22)]
        expected = torch.arange(start, start + part.numel(), device="cpu").mul_(_FACTOR).add_(_SHIFT)
        wrong += int((part != expected).sum())
    if wrong:
        raise StormError(f"{wrong} of {home.numel()} numbers came back wrong. This is a defect: please report it.")
