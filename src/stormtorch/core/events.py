"""Events, as data: one schema and one clock for everything that a report is computed from.

Lanes, files, the pool, the worker, the loader and waits emit spans into a sink. The clock is ``time.perf_counter``;
memory/cuda/clock.py maps a GPU's times to it. A sink is called on the thread that noticed the event, often not the
user's: it must be quick and must not raise.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from .tags import Tag


class What(enum.Enum):
    """The kind of an event. An event that takes no time ends when it starts."""

    SETUP = "setup"  # a session was opened
    COPY = "copy"  # a lane has finished a copy; ``name``: the lane
    READ = "read"  # a request to a file, however many system calls it took; ``name``: the path. With a tag: all that
    # native threads have read since they last told, for ``share`` of the time
    WRITE = "write"  # as READ
    WAIT = "wait"  # ``name``: the cause. Compute waited for "weights", "updates", ...; a training loop for "data"
    LOAD = "load"  # a unit's weights were requested; their COPY follows
    MISS = "miss"  # a unit was used that was neither present nor on its way
    UPDATE = "update"  # the worker updated for ``share`` of the time, on average over its threads
    GPU_IDLE = "gpu idle"  # the GPU was, for ``share`` of the time; that is partly an estimate
    POOL = "pool"  # the device's pool grew or shrank to ``bytes``
    STEP = "step"  # an optimizer step was called; starts where the last one ended
    BATCH = "batch"  # the loader gave a batch of ``times`` samples; starts where the last one ended


class Span(NamedTuple):
    """One event. A tuple, because a frozen dataclass takes four times as long to make."""

    what: What
    start_s: float
    end_s: float
    name: str = ""
    tag: Tag | None = None
    bytes: int = 0
    unit: int | None = None  # its index
    times: int = 1
    share: float = 1.0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


Sink = Callable[[Span], None]
