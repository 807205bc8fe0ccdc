"""Which cases a group has, with sizes that the machine can hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cases import PEERS, ROW_BYTES, SHARD_ROWS, Case

GROUPS = ("rows", "tokens", "flat", "gpu")
_SHARE_OF_DISK = 0.95  # of what is free: a disk that is full to the brim is a slow one
_SHARE_OF_RAM = 0.6  # for the page cache
_GROWTH = 4  # from one size of `flat` to the next
_LIGHT = 64  # width of a convnet so small that launching its kernels is all that a step takes
_SEED_ROWS = (50_000, 100_000, 500_000, 1_000_000, 5_000_000)


@dataclass(frozen=True, kw_only=True)
class Machine:
    disk_free_bytes: int
    ram_bytes: int
    device: str


def cases_of(
    group: str, folder: Path, machine: Machine, *, tiny: bool, largest: int, packages: list[str]
) -> list[Case]:
    """The cases of a group, in the order in which they run. ``packages`` are the peers wanted, beside ours."""
    if group in {"rows", "tokens"}:
        rows = 256 if tiny else {"rows": 81_920, "tokens": 245_760}[group]  # 1.0 GB
        methods = ["storm", *(method for package in packages for method in PEERS[package])]
        quick: dict[str, Any] = {"seconds": 0.1, "rounds": 1, "batch": 16} if tiny else {}
        return [
            Case(group=group, method=method, kind=group, rows=rows, folder=str(folder), **quick) for method in methods
        ]
    return _flat(folder, machine, tiny, largest) if group == "flat" else _gpu(folder, machine, tiny)


def _flat(folder: Path, machine: Machine, tiny: bool, largest: int) -> list[Case]:
    settings: dict[str, Any] = {"group": "flat", "kind": "rows", "folder": str(folder), "device": machine.device}
    if tiny:
        settings |= {
            "set_rows": 4096,
            "shard_rows": 512,
            "seconds": 0.01,
            "window": "512KiB",
            "batch": 16,
            "patience_s": 0,
        }
        plans = (("storm-direct", 512), ("storm-direct", 4096), ("storm-cached", 512))
        return [Case(method=method, rows=rows, **settings) for method, rows in plans]
    most, note = _bounded(largest // ROW_BYTES, machine)
    settings |= {"set_rows": most, "seconds": 8, "limit_s": 900}
    sizes = [SHARD_ROWS]
    while sizes[-1] * _GROWTH < most:
        sizes.append(sizes[-1] * _GROWTH)
    if most < 2 * sizes[-1]:
        sizes[-1] = most
    else:
        sizes += [most]
    direct = [Case(method="storm-direct", rows=rows, **settings) for rows in sizes]
    direct[-1] = _noted(direct[-1], note)
    cached = [
        Case(method="storm-cached", rows=rows, **settings)
        for rows in sizes
        if rows * ROW_BYTES < _SHARE_OF_RAM * machine.ram_bytes
    ]
    return direct + cached


def _gpu(folder: Path, machine: Machine, tiny: bool) -> list[Case]:
    settings: dict[str, Any] = {"group": "gpu", "kind": "rows", "folder": str(folder), "device": machine.device}
    if tiny:
        settings |= {"width": 2, "batch": 4, "seconds": 0.2}
        plans = [("train", 64), ("train-direct", 128), ("train-light", 64)]
        return [Case(method=method, rows=rows, **settings) for method, rows in plans]
    cases = []
    for rows in _SEED_ROWS:
        fitting, note = _bounded(rows, machine)
        if fitting * ROW_BYTES > _SHARE_OF_RAM * machine.ram_bytes:
            fitting = int(_SHARE_OF_RAM * machine.ram_bytes / ROW_BYTES) // SHARD_ROWS * SHARD_ROWS
            note = f"of {rows:,} rows, what fits in RAM"
        case = Case(method="train", rows=fitting, seconds=12, limit_s=120, **settings)
        cases.append(_noted(case, note))
    largest = cases[-1].rows
    light = Case(method="train-light", rows=min(500_000, largest), seconds=12, limit_s=60, width=_LIGHT, **settings)
    direct = Case(method="train-direct", rows=min(1_000_000, largest), seconds=12, limit_s=60, **settings)
    return [*cases[:3], light, *cases[3:], direct]


def _bounded(rows: int, machine: Machine) -> tuple[int, str]:
    """As many of ``rows``, in whole shards, as the disk has room for, and what to say where that is fewer."""
    most = int(machine.disk_free_bytes * _SHARE_OF_DISK) // ROW_BYTES
    fitting = max(1, min(rows, most) // SHARD_ROWS) * SHARD_ROWS
    free = f"{machine.disk_free_bytes / 1e9:.0f} GB"
    if most < SHARD_ROWS:
        raise ValueError(f"{SHARD_ROWS:,} rows need {SHARD_ROWS * ROW_BYTES / 1e9:.1f} GB of disk; {free} are free")
    return fitting, f"of {rows:,} rows, what fits on a disk with {free} free" if most < rows else ""


def _noted(case: Case, note: str) -> Case:
    return Case(**{**vars(case), "note": note})
