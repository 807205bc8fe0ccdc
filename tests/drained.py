"""Waits for the CPU worker's jobs."""

from __future__ import annotations

import time

from stormtorch.native.worker.jobs import Worker


def drained(worker: Worker, timeout_s: float = 20.0) -> bool:
    """Block until no job is left; False if the time ran out first."""
    until = time.monotonic() + timeout_s
    while worker.stats().pending:
        if time.monotonic() >= until:
            return False
        time.sleep(0.0005)
    return True
