"""Runs one case in a process of its own, and ends it when it takes too long or all of the machine's RAM."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.process import end, start, why_it_ended

from stormtorch.core.sizes import GiB
from stormtorch.memory.books.limits import host_available_bytes

from .cases import Case
from .results import Result

_POLL_S = 0.1
_START_LIMIT_S = 120  # imports, the CUDA context, and what a peer compiles at first use


def ready_file(file: Path) -> Path:
    """Beside the result's file: its process creates it when the case's own time begins."""
    return file.with_suffix(".ready")


def run_isolated(
    case: Case, command: list[str], file: Path, log: Path, *, cwd: Path, environment: Mapping[str, str] | None = None
) -> Result:
    """The result that the process wrote to ``file``, or why there is none. Its output is appended to ``log``.

    ``environment``: variables that it has beside ours."""
    free = lowest = host_available_bytes()
    # A machine whose RAM is full may not answer again: stop short of that.
    floor = min(2 * GiB, free // 20)
    reason = ""
    with log.open("a") as output:
        output.write(f"\n=== {case.settings}\n")
        output.flush()
        start_s, ready, limit_s = time.monotonic(), False, float(_START_LIMIT_S)
        process = start(command, cwd=cwd, output=output, environment=environment)
        try:
            while not reason:
                try:
                    process.wait(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    lowest = min(lowest, host_available_bytes())
                if lowest < floor:
                    reason = f"out of RAM: stopped when {lowest / GiB:.1f} GiB were left"
                elif not ready and ready_file(file).exists():
                    start_s, ready, limit_s = time.monotonic(), True, case.limit_s
                elif time.monotonic() > start_s + limit_s:
                    reason = f"stopped {'' if ready else 'before it was ready, '}after {limit_s:g} s"
        finally:
            code = end(process)
    taken = free - lowest
    if file.exists():
        return replace(Result.from_json(json.loads(file.read_text())), ram_bytes=taken)
    return Result(case=case, failed=reason or why_it_ended(code, log), ram_bytes=taken)
