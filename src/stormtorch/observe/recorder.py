"""Adds up the records of lanes. Cheap enough to be always on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core.records import Asked, Copied, Record, Waited
from ..core.tags import Tag

_MARKS = 33  # of the last 32 steps, and the one before


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The sums at the end of a step: when, all waits of compute, and how often the GPU was checked and was idle.
    ``asked`` is 0 if it cannot be checked."""

    at_s: float
    waited_s: float
    asked: int
    idle: float


@dataclass
class Totals:
    """Bytes and seconds by lane and tag, waits by cause, and when steps ended."""

    bytes: dict[tuple[str, Tag], int] = field(default_factory=dict)
    busy_s: dict[tuple[str, Tag], float] = field(default_factory=dict)
    waits_s: dict[str, float] = field(default_factory=dict)
    step_ends_s: list[float] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)  # at the ends of the last steps


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
    """A sink for lanes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may ask for a report inside any call below
        self._totals = Totals()
        self._asked, self._marks = Asked(0, 0), deque[Mark](maxlen=_MARKS)

    def __call__(self, record: Record) -> None:
        if isinstance(record, Copied):
            key = (record.lane, record.tag)
            with self._lock:
                totals = self._totals
                totals.bytes[key] = totals.bytes.get(key, 0) + record.bytes
                totals.busy_s[key] = totals.busy_s.get(key, 0.0) + record.seconds
        elif isinstance(record, Waited):
            with self._lock:
                waits = self._totals.waits_s
                waits[record.cause] = waits.get(record.cause, 0.0) + record.seconds
        elif isinstance(record, Asked):
            with self._lock:
                self._asked = record

    def step(self) -> None:
        """Note that an optimizer step was called."""
        with self._lock:
            now_s, waited_s = time.perf_counter(), sum(self._totals.waits_s.values())
            self._totals.step_ends_s.append(now_s)
            asked, idle = self._asked.times, self._asked.idle
            self._marks.append(Mark(at_s=now_s, waited_s=waited_s, asked=asked, idle=idle))

    def snapshot(self) -> Totals:
        with self._lock:
            t = self._totals
            return Totals(dict(t.bytes), dict(t.busy_s), dict(t.waits_s), list(t.step_ends_s), list(self._marks))
