"""CPU time of this process and its workers: what a method costs, also where others share the machine, and theirs."""

from __future__ import annotations

import os
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Of all threads of this process and of its children, the living and those that were waited for; theirs not."""
    return sum(_spent(process) for process in [os.getpid(), *_children()])


def machine_busy_seconds() -> float:
    """Of all cores, by whomever; also what the hypervisor gave to others."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split(maxsplit=11)[1:11]]
    user, nice, system, _, _, irq, softirq, stolen, *_ = fields
    return (user + nice + system + irq + softirq + stolen) * _TICK_S


def _children() -> list[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return [int(word) for children in lists for word in children.read_text().split()]


def _spent(process: int) -> float:
    try:
        # What stands before the last bracket is the command's name, which may hold anything.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it ended meanwhile
        return 0.0
    return sum(int(field) for field in fields[11:15]) * _TICK_S
