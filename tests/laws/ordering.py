"""Who has seen whose work, and which accesses of memory nothing orders.

An *actor* does its work in order: the host, compute, each lane, each job of the worker. Vector clocks say how far the
work of one has been seen by another: directly, through an event or a flag, or through a third. Two accesses of the same
bytes, of which one writes, are a *race* if neither actor had seen the other's. So a race is found in every run, however
the threads happen to be scheduled."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import NamedTuple

HOST = "host"
Clock = dict[str, int]  # how far each actor's work has been seen


class Point(NamedTuple):
    """A point in an actor's order, with all that it had seen by then."""

    actor: str
    time: int
    clock: Clock


class Access(NamedTuple):
    """A use of bytes."""

    actor: str
    time: int
    writes: bool
    what: str
    where: object = None  # who asked for it


class Clocks:
    """What each actor has seen. Work of any actor comes after all that the host had seen when it asked for it."""

    def __init__(self) -> None:
        self._clocks: dict[str, Clock] = {HOST: {HOST: 1}}
        self._news = 0  # changes whenever the host has seen more
        self._known: dict[str, int] = {}  # the news that each actor has
        self._has_asked = False  # whether someone was asked for work since the host's last access

    def ask(self, actor: str) -> Clock:
        """Ask ``actor`` for work; returns what it has seen when it begins."""
        clock = self._clocks.setdefault(actor, {actor: 1})
        if actor == HOST:
            if self._has_asked:  # those that were asked have not seen what the host does now
                clock[HOST] += 1
                self._news += 1
                self._has_asked = False
            return clock
        self._has_asked = True
        if self._known.get(actor) != self._news:
            _see(clock, self._clocks[HOST])
            self._known[actor] = self._news
        return clock

    def point(self, actor: str) -> Point:
        """The point after all that ``actor`` was asked for so far."""
        clock = self.ask(actor)
        point = Point(actor, clock[actor], dict(clock))
        clock[actor] += 1
        return point

    def has_seen(self, actor: str, point: Point) -> bool:
        return self._clocks[actor].get(point.actor, 0) >= point.time

    def see(self, actor: str, point: Point) -> None:
        """All later work of ``actor`` comes after ``point``."""
        clock = self.ask(actor)
        if not self.has_seen(actor, point):
            _see(clock, point.clock)
            self._news += actor == HOST


def _see(clock: Clock, other: Clock) -> None:
    for actor, time in other.items():
        if clock.get(actor, 0) < time:
            clock[actor] = time


@dataclass(slots=True)
class _Span:
    """Bytes that were all used alike."""

    start: int
    stop: int
    write: Access | None = None  # the last one
    reads: dict[str, Access] = field(default_factory=dict)  # since then, the last one of each actor

    def part(self, start: int, stop: int) -> _Span:
        return _Span(start, stop, self.write, dict(self.reads))


class Memory:
    """The last uses of all bytes, in spans that do not overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._spans: list[_Span] = []

    def use(self, start: int, stop: int, access: Access, clock: Clock) -> list[Access]:
        """Note an access of an actor that has seen ``clock``; returns those that it should have come after."""
        first, spans = self._cut(start, stop)
        earlier = [span.write for span in spans if span.write is not None]
        if access.writes:
            earlier += [read for span in spans for read in span.reads.values()]
            self._replace(first, len(spans), [_Span(start, stop, access)])
        else:
            self._note_read(first, spans, start, stop, access)
        return [use for use in earlier if use.actor != access.actor and clock.get(use.actor, 0) < use.time]

    def _note_read(self, first: int, spans: list[_Span], start: int, stop: int, access: Access) -> None:
        at, found = start, list[_Span]()
        for span in spans:
            span.reads[access.actor] = access
            if at < span.start:
                found.append(_Span(at, span.start, None, {access.actor: access}))
            found.append(span)
            at = span.stop
        if at < stop:
            found.append(_Span(at, stop, None, {access.actor: access}))
        if len(found) > len(spans):
            self._replace(first, len(spans), found)

    def _cut(self, start: int, stop: int) -> tuple[int, list[_Span]]:
        """Cut the spans at both ends; returns the index of the first one between them, and all of them."""
        for at in (start, stop):
            index = bisect.bisect_right(self._starts, at) - 1
            if index >= 0 and self._spans[index].start < at < self._spans[index].stop:
                span = self._spans[index]
                self._replace(index, 1, [span.part(span.start, at), span.part(at, span.stop)])
        first = bisect.bisect_left(self._starts, start)
        return first, self._spans[first : bisect.bisect_left(self._starts, stop)]

    def _replace(self, first: int, count: int, spans: list[_Span]) -> None:
        self._spans[first : first + count] = spans
        self._starts[first : first + count] = [span.start for span in spans]
