"""The disks in ``storm doctor``: their rates, GPUDirect Storage, and what a step with states on them costs."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

from ..core.errors import SettingError, StorageError
from ..core.sizes import GiB, MiB, format_bytes
from ..memory.books import limits
from ..memory.disk.filesystems import Place
from ..planner.disk_step import DiskStep, Dtype, disk_step
from ..planner.measure.disk import DiskMeasurement, Progress, measure_disk, measure_together
from ..planner.measure.gds import probe_gds

LIMIT_BYTES, LIMIT_S = 2 * GiB, 10.0
_TABLE = (1, 3, 8, 14, 32)  # 10⁹ parameters
_DTYPES: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
_TBW = 600e12  # what drives of 1 TB are usually made for
_COUNT = re.compile(r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:e[0-9]{1,2})?) ?([kmbt]?)", re.ASCII | re.IGNORECASE)
_REMARKS = {
    Place.NETWORK: "a network file system: others share its rate, and a network that stops stops training",
    Place.HOST: "a folder of the machine's host: slower than a disk, and its cache may hide the rate",
    Place.PROGRAM: "FUSE: a program moves these bytes, perhaps over a network",
    Place.LAYER: "the layer of a container over another filesystem: mount a volume on a disk instead",
}


def parse_count(text: str) -> int:
    """A number of parameters: 8e9, 8B, 1.5b, 500M, 8_000_000_000."""
    match = _COUNT.fullmatch(text.strip())
    count = int(Decimal(match[1].replace("_", "")) * 1000 ** " kmbt".index(match[2].lower() or " ")) if match else 0
    if not 1 <= count <= 10**15:
        raise SettingError(
            f"--parameters {text} is not a number of parameters. Accepted: 8e9, 8B, 500M, 8_000_000_000, of at least 1."
        )
    return count


def report_disks(directories: Sequence[Path], count: int | None, *, has_gpu: bool) -> int:
    """Measure each directory and print the findings; returns the exit status. A disk that fails ends no other."""
    measured: list[DiskMeasurement] = []
    told, status = "", 0
    for directory in directories:
        try:
            found = _measured(directory)
        except StorageError as error:
            print(f"storm doctor: {error}", file=sys.stderr)
            status = 1
            continue
        if found.rates is None:
            continue
        measured.append(found)
        finding = probe_gds(directory, has_gpu=has_gpu)
        gds = f"{'works' if finding.works else 'does not work here'}: {finding.reason}"
        if gds != told:
            print(f"GPUDirect Storage: {gds}. STORM does not use it yet")
        told = gds
    if not measured:
        return status
    try:
        rate = _together(measured)
        print_costs(rate, _free_bytes(measured), count)
    except StorageError as error:
        print(f"storm doctor: {error}", file=sys.stderr)
        status = 1
    return status


def _measured(directory: Path) -> DiskMeasurement:
    """Measure a directory and print its lines."""
    with _Shown(str(directory)) as shown:
        found = measure_disk(directory, limit_bytes=LIMIT_BYTES, limit_s=LIMIT_S, progress=shown)
    space = f"{format_bytes(found.free_bytes)} free of {format_bytes(found.total_bytes)}"
    mode = f"; {'direct' if found.direct else 'buffered'} I/O ({found.reason})" if found.reason else ""
    print(f"disk: {directory}: {space} ({found.filesystem}){mode}")
    if remark := _REMARKS.get(found.place):
        print(f"disk: {directory}: {remark}")
    if found.rates is None:
        print(f"disk: {directory} was not measured: {found.obstacle}. Name a directory on another disk")
        return found
    rates = found.rates
    speeds = f"writes {_rate(rates.write_bytes_per_s)}, reads {_rate(rates.read_bytes_per_s)}"
    method = f"blocks of {rates.request_bytes // MiB} MiB, {found.threads} at a time, {format_bytes(rates.file_bytes)}"
    print(f"disk: {directory}: {speeds}, both at once {_rate(rates.mixed_bytes_per_s)} in all")
    print(f"disk: {directory}: by {method} in {rates.seconds:.1f} s; drives can be slower after tens of GiB")
    if rates.from_disk is not None and rates.from_disk < 0.5:
        share = f"{rates.from_disk:.0%} of the reads as reads of a device"
        print(f"disk: {directory}: the kernel counted {share}: the rate may be that of a cache")
    elif not found.direct:
        print(f"disk: {directory}: without direct I/O, the page cache takes RAM that no budget counts")
    return found


def _together(measured: Sequence[DiskMeasurement]) -> float:
    """The mixed rate of all directories at once; prints it if there are several."""
    alone = sum(found.rates.mixed_bytes_per_s for found in measured if found.rates is not None)
    if len(measured) == 1:
        return alone
    with _Shown("all of them") as shown:
        where = [found.directory for found in measured]
        rate = measure_together(where, limit_bytes=LIMIT_BYTES, limit_s=LIMIT_S, progress=shown)
    shared = "; they share a disk, or a limit" if rate < 0.75 * alone else ""
    print(f"disk: all {len(measured)} at once, in equal parts: {_rate(rate)} in all{shared}")
    return rate


def _free_bytes(measured: Sequence[DiskMeasurement]) -> int:
    """What fits on all directories in equal parts. Directories of one filesystem share its free space."""
    devices = [found.device for found in measured]
    return min(found.free_bytes // devices.count(found.device) for found in measured) * len(measured)


def print_costs(mixed_bytes_per_s: float, free_bytes: int, count: int | None) -> None:
    """Print what a step costs: of one model in each dtype, or of models of several sizes in bf16."""
    if count is None:
        steps = [disk_step(size * 10**9, mixed_bytes_per_s=mixed_bytes_per_s) for size in _TABLE]
        names = ["parameters", *(f"{size}e9" for size in _TABLE)]
        model = "bf16 weights with fp32 masters"
    else:
        steps = [disk_step(count, mixed_bytes_per_s=mixed_bytes_per_s, dtype=dtype) for dtype in _DTYPES]
        names = ["weights", *_DTYPES]
        model = f"{count:,} parameters with fp32 masters"
    ram_bytes = limits.host_total_bytes()
    head = ["on disk", "time at least", "written in 1,000 steps", "of 600 TBW", "RAM", 'RAM, step="backward"']
    rows = [head, *(_row(step, free_bytes, ram_bytes) for step in steps)]
    table = [[name, *row] for name, row in zip(names, rows, strict=True)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print(f"\nA step of AdamW on {model}. It reads all optimizer states from disk, and writes them back:")
    for line in table:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print(f"Time: the disk's, at {_rate(mixed_bytes_per_s)}; accumulation spreads it over more tokens.")
    print("600 TBW: what a drive of 1 TB is typically made for; yours has its own figure.")
    print("RAM: weights and gradients, without activations.")
    if count is None:
        print("fp32 weights take 0.8 of these bytes and times, and twice the RAM; fp16 takes 1.2 of them.")
    if any(cell.endswith("*") for line in table for cell in line):
        print(f"*: more than what is free on disk ({_size(free_bytes)}), or than the RAM here ({_size(ram_bytes)}).")


def _row(step: DiskStep, free_bytes: int, ram_bytes: int) -> list[str]:
    def within(size: int, limit: int) -> str:
        return f"{_size(size)}{'*' if size > limit else ''}"

    return [
        within(step.state_bytes, free_bytes),
        _time(step.seconds),
        _size(step.state_bytes * 1000),
        f"{step.drive_life(1000, _TBW):.1%}",
        within(step.ram_bytes, ram_bytes),
        within(step.ram_backward_bytes, ram_bytes),
    ]


def _size(count: float) -> str:
    """In powers of ten, as drives are sold."""
    units = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"))
    unit, name = next((pair for pair in units if count >= pair[0]), units[-1])
    return f"{count / unit:.{0 if count >= 100 * unit else 1}f} {name}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.1f} MB/s"


def _time(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.{0 if seconds >= 100 else 1}f} s"


class _Shown:
    """A line on a terminal's stderr that says what is being measured, and is gone afterwards."""

    def __init__(self, what: str) -> None:
        self._what, self._terminal = what, sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._shown_s = float("-inf")

    def __call__(self, phase: str, done_bytes: int) -> None:
        now_s = time.monotonic()
        if self._terminal and now_s - self._shown_s >= 0.2:
            self._shown_s = now_s
            self._draw(f"\r{self._what}: {phase}, {format_bytes(done_bytes)}")

    def __enter__(self) -> Progress:
        self("opening", 0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            self._draw("\r")

    def _draw(self, text: str) -> None:
        print(f"{text}\x1b[K", end="", file=sys.stderr, flush=True)
