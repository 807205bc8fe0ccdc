"""Arithmetic on spans of time: when anything ran, and when several things ran at once."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]  # start and end, microseconds


def union(spans: Iterable[Span], *, gap: float = 0.0) -> list[Span]:
    """The same time in spans that neither touch nor overlap; those at most ``gap`` apart become one."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def common(first: list[Span], second: list[Span]) -> list[Span]:
    """The time that lies in both; each must be a union."""
    found: list[Span] = []
    one, two = iter(first), iter(second)
    a, b = next(one, None), next(two, None)
    while a is not None and b is not None:
        start, end = max(a[0], b[0]), min(a[1], b[1])
        if start < end:
            found.append((start, end))
        if a[1] < b[1]:
            a = next(one, None)
        else:
            b = next(two, None)
    return found


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
