"""Records of events, as data. Lanes and files emit records into a sink; reports are made from them alone.

A sink is called on the thread that noticed the event, often not the user's: it must be quick and must not raise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .tags import Tag


@dataclass(frozen=True, slots=True)
class Copied:
    """One copy that a lane has finished. ``start_s`` counts from the lane's first record."""

    lane: str
    tag: Tag
    bytes: int
    start_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class FileAccess:
    """One finished request to a file, however many system calls it took. Clock: ``time.perf_counter``."""

    path: str
    write: bool
    bytes: int
    start_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Waited:
    """Compute waited for ``seconds`` because of ``cause``: "weights", "states" or "gradients" in flight, or "updates"
    for which weights have to wait themselves."""

    cause: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Asked:
    """How often the GPU was checked since the session began, and how often it had nothing to do."""

    times: int
    idle: float  # partly an estimate


Record = Copied | FileAccess | Waited | Asked
Sink = Callable[[Record], None]
