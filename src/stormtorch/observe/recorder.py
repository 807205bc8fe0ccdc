"""Adds up events. Cheap enough to be always on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field

from ..core.events import Span, What
from ..core.tags import Tag

_MARKS = 33  # of the last 32 steps, and the one before
_LATEST = 4096  # some steps; about 1 MB


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The sums at the end of a step: when, all waits of compute, and how long the GPU was looked at and was idle.
    ``looked_s`` is 0 if it cannot be looked at."""

    at_s: float
    waited_s: float
    looked_s: float
    idle_s: float


@dataclass
class Totals:
    """Bytes and seconds of copies by lane and tag, and of reads and writes by kind and tag; waits by cause; the number
    and seconds of other events by kind; the bytes of the pool; and when steps ended."""

    bytes: dict[tuple[str, Tag], int] = field(default_factory=dict)
    busy_s: dict[tuple[str, Tag], float] = field(default_factory=dict)
    waits_s: dict[str, float] = field(default_factory=dict)
    times: dict[What, int] = field(default_factory=dict)
    seconds: dict[What, float] = field(default_factory=dict)
    pool_bytes: int = 0
    step_ends_s: list[float] = field(default_factory=list)
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=_MARKS))  # at the ends of the last steps


def link_rates(totals: Totals) -> tuple[float, float]:
    """Bytes per second out and in that the lanes have reached so far; 0 if nothing has moved yet."""
    return lane_rate(totals, "store"), lane_rate(totals, "load")


def lane_rate(totals: Totals, lane: str, *, since: Totals | None = None) -> float:
    """Bytes per second that the lane has reached, since then or ever; 0 if nothing has moved."""

    def moved(amounts: Mapping[tuple[str, Tag], float], before: Mapping[tuple[str, Tag], float]) -> float:
        return sum(amount - before.get(key, 0) for key, amount in amounts.items() if key[0] == lane)

    since = since or Totals()
    busy_s = moved(totals.busy_s, since.busy_s)
    return moved(totals.bytes, since.bytes) / busy_s if busy_s > 0 else 0.0


class Recorder:
    """A sink. Keeps totals, and the latest events as they are. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may ask for a report inside any call below
        self._totals, self._latest = Totals(), deque[Span](maxlen=_LATEST)
        self._looked_s = 0.0  # in which the GPU was looked at
        self._step_start_s = time.perf_counter()

    def __call__(self, span: Span) -> None:
        what, seconds = span.what, (span.end_s - span.start_s) * span.share
        with self._lock:
            totals = self._totals
            self._latest.append(span)
            if what is What.COPY or (span.tag is not None and what in (What.READ, What.WRITE)):
                assert span.tag is not None
                key = (span.name if what is What.COPY else what.value, span.tag)
                totals.bytes[key] = totals.bytes.get(key, 0) + span.bytes
                totals.busy_s[key] = totals.busy_s.get(key, 0.0) + seconds
                return
            if what is What.WAIT:
                totals.waits_s[span.name] = totals.waits_s.get(span.name, 0.0) + seconds
                return
            totals.times[what] = totals.times.get(what, 0) + span.times
            totals.seconds[what] = totals.seconds.get(what, 0.0) + seconds
            if what is What.GPU_IDLE:
                self._looked_s += span.end_s - span.start_s
            elif what is What.POOL:
                totals.pool_bytes = span.bytes
            elif what is What.STEP:
                totals.step_ends_s.append(span.end_s)
                waited_s, idle_s = sum(totals.waits_s.values()), totals.seconds.get(What.GPU_IDLE, 0.0)
                totals.marks.append(Mark(at_s=span.end_s, waited_s=waited_s, looked_s=self._looked_s, idle_s=idle_s))

    def step(self) -> None:
        """Note that an optimizer step was called."""
        start_s, self._step_start_s = self._step_start_s, time.perf_counter()
        self(Span(What.STEP, start_s, self._step_start_s))

    def latest(self) -> list[Span]:
        """The latest events, in the order in which they were noticed: a copy on a GPU some time after its end."""
        with self._lock:
            return list(self._latest)

    def snapshot(self) -> Totals:
        with self._lock:
            return Totals(**{name: copy(value) for name, value in vars(self._totals).items()})
