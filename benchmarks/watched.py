"""Waits for a case's process, and ends it when it takes too long or all of the machine's RAM."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path

import psutil
from benchmarks.about import ROOT
from benchmarks.process import end, start, why_it_ended

from stormtorch.core.sizes import GiB, MiB
from stormtorch.memory.books.limits import host_available_bytes

_POLL_S = 0.1
_NOTABLE_BYTES = 64 * MiB
START_LIMIT_S = 120.0  # imports, the CUDA context, and what a peer compiles at first use


@dataclass(frozen=True)
class Watched:
    failed: str  # why there is no result; empty where there is one
    ram_bytes: int  # the most that the machine's free RAM shrank meanwhile


def ready_file(file: Path) -> Path:
    """Beside the result's file: its process creates it when the case's own time begins."""
    return file.with_suffix(".ready")


def watch(
    command: list[str],
    file: Path,
    log: Path,
    *,
    title: str,
    limit_s: float,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    start_limit_s: float = START_LIMIT_S,
) -> Watched:
    """Returns when the process has ended; its result is in ``file``. Its output is appended to ``log``.

    ``environment``: variables that it has beside ours. ``start_limit_s``: until it is ready."""
    free = lowest = _free_bytes()
    kinds, then, noted = _ram_kinds(), "", free
    # A machine whose RAM is full may not answer again: stop short of that.
    floor = min(2 * GiB, free // 20)
    reason = ""
    with log.open("a") as output:
        output.write(f"\n=== {title}\n")
        output.flush()
        start_s, ready, left_s = time.monotonic(), False, start_limit_s
        process = start(command, cwd=cwd, output=output, environment=environment)
        try:
            while not reason:
                try:
                    process.wait(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    available = _free_bytes()
                    if available < noted - _NOTABLE_BYTES:
                        then, noted = _what_is_used(kinds, process.pid, time.monotonic() - start_s), available
                    lowest = min(lowest, available)
                if lowest < floor:
                    reason = f"out of RAM: stopped when {lowest / GiB:.1f} GiB were left"
                elif not ready and ready_file(file).exists():
                    start_s, ready, left_s = time.monotonic(), True, limit_s
                elif time.monotonic() > start_s + left_s:
                    reason = f"stopped {'' if ready else 'before it was ready, '}after {left_s:g} s"
        finally:
            code = end(process)
        output.write(f"{then}\n")
    failed = "" if file.exists() else reason or why_it_ended(code, log)
    return Watched(failed=failed, ram_bytes=free - lowest)


def _free_bytes() -> int:
    """RAM that can be taken. A CPU keeps a list of pages that were freed on it: up to an eighth of the memory on all
    lists. They are free, and MemAvailable does not count them."""
    listed = sum(int(line.split()[1]) for line in _lines("/proc/zoneinfo") if line.lstrip().startswith("count:"))
    return host_available_bytes() + listed * PAGESIZE


def _ram_kinds() -> dict[str, int]:
    """The system's own account, in bytes: RAM that a process takes need not be in its RSS."""
    lines = (line.split() for line in _lines("/proc/meminfo"))
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[-1] == "kB"}


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text().splitlines()
    except OSError:  # only Linux has it
        return []


def _what_is_used(before: dict[str, int], pid: int, after_s: float) -> str:
    """What the machine's RAM is used for now that it was not used for ``before``, and the RSS of the process."""
    now = _ram_kinds()
    changes = {name: now[name] - before.get(name, 0) for name in now if not name.startswith(("Vmalloc", "DirectMap"))}
    notable = [f"{name} {change / GiB:+.2f}" for name, change in changes.items() if abs(change) > _NOTABLE_BYTES]
    try:
        rss = f"{psutil.Process(pid).memory_info().rss / GiB:.2f}"
    except psutil.Error:
        rss = "?"
    return f"RAM when the least was free, after {after_s:.1f} s, in GiB: RSS {rss}; {', '.join(notable)}"
