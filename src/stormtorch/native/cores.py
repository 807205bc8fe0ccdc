"""How many CPU cores this process may use, and which of them the optimizer's worker uses."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

_CGROUP, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def read_text(path: Path) -> str:
    """The text of a file of the system's; empty if it cannot be read."""
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""


def quota_cores(root: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> float:
    """How many cores' worth of time the control groups allow, by the tightest one; infinite without a limit."""
    limits = [math.inf]
    groups = {root}
    for line in read_text(membership).splitlines():
        if line.startswith("0::"):
            group = root / line.removeprefix("0::").strip("/")
            groups |= {path for path in (group, *group.parents) if path.is_relative_to(root)}
    for group in groups:
        match read_text(group / "cpu.max").split():
            case [quota, period] if quota != "max":
                limits.append(int(quota) / int(period))
    match (
        read_text(root / "cpu/cpu.cfs_quota_us").split(),
        read_text(root / "cpu/cpu.cfs_period_us").split(),
    ):  # version 1
        case [[quota], [period]] if int(quota) > 0:
            limits.append(int(quota) / int(period))
    return min(limits)


@functools.cache
def own_quota() -> float:
    """The quota as it was when this process first asked: an update asks too, and the files take longer than it does."""
    return quota_cores()


def usable_count() -> int:
    """Cores that this process may keep busy: those it may run on, limited by its quota, at least one."""
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), own_quota())))


def worker_share() -> tuple[int, list[int]]:
    """Threads for the worker, and the CPU ids they may run on.

    One core of two to four is spared, two of more: for the thread that launches GPU work, which must never wait for a
    core. If a quota limits the process, rather than the number of cores, no core can be spared and threads may run on
    any."""
    allowed = sorted(os.sched_getaffinity(0))
    usable = usable_count()
    spared = 0 if usable == 1 else 1 if usable <= 4 else 2
    return usable - spared, allowed[spared:] if usable == len(allowed) else allowed
