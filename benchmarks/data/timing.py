"""Epochs timed, and the proof that each gave every row once."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .cpu import cpu_seconds

_MOST_ROUNDS = 15
_SLOW = 5  # times the time that was meant to be enough


def timed_epochs(case: Case, epoch: Callable[[], Iterable[Tensor]]) -> dict[str, Any]:
    """Epochs until there are enough, after one that warms up; the figures are medians over epochs.

    ``rate`` leaves out the first tenth of each epoch, in which worker processes and queues fill; ``epoch_rate`` does
    not. ``best_rate`` is the fastest epoch, ``cpu_s`` the CPU time of a sample, workers included: both say more where
    others share the machine. The consumer does next to nothing with a batch: it keeps the numbers of its rows.
    """
    _epoch(case, epoch())
    rates: list[float] = []
    epoch_rates: list[float] = []
    start_s, cpu_s = time.perf_counter(), cpu_seconds()
    while _goes_on(case, len(rates), time.perf_counter() - start_s):
        rate, epoch_rate = _epoch(case, epoch())
        rates.append(rate)
        epoch_rates.append(epoch_rate)
    return {
        "rate": statistics.median(rates),
        "best_rate": max(rates),
        "cpu_s": (cpu_seconds() - cpu_s) / len(rates) / case.rows,
        "spread": (max(rates) - min(rates)) / statistics.median(rates),
        "epoch_rate": statistics.median(epoch_rates),
        "bytes_per_s": statistics.median(rates) * case.row_bytes,
        "rounds": len(rates),
        "rss_bytes": peak_rss_bytes(),
    }


def _goes_on(case: Case, rounds: int, spent_s: float) -> bool:
    """Some epochs at least, more while there is time; of a method that takes minutes for one, no more than that."""
    if spent_s < case.seconds:
        return rounds < _MOST_ROUNDS
    return rounds < (1 if spent_s > _SLOW * case.seconds else case.rounds)


def _epoch(case: Case, batches: Iterable[Tensor]) -> tuple[float, float]:
    """Rows per second without the first tenth, and with it. Raises if a row is missing or came twice."""
    marks: list[Tensor] = []
    begin = max(1, -(-case.rows // case.batch) // 10)
    clock = time.perf_counter
    start_s = steady_s = clock()
    for count, batch in enumerate(batches, start=1):
        marks.append(batch[:, :2].clone())
        if count == begin:
            steady_s = clock()
    end_s = clock()
    check_once(case, marks)
    steady = case.rows - begin * case.batch
    return (steady if steady > 0 else case.rows) / (end_s - (steady_s if steady > 0 else start_s)), case.rows / (
        end_s - start_s
    )


def check_once(case: Case, marks: list[Tensor]) -> None:
    """``marks`` are the first two values of each row, batch by batch."""
    numbers = numbers_of(case.kind, torch.cat([mark.cpu() for mark in marks]))
    if not torch.equal(numbers.sort().values, torch.arange(case.rows)):
        distinct = int(numbers.unique().numel())
        raise RuntimeError(f"{case.rows} rows were due once each; {len(numbers)} came, {distinct} of them distinct")


def numbers_of(kind: str, marks: Tensor) -> Tensor:
    """The row numbers in the first two values of rows."""
    if kind == "rows":
        return marks[:, 0].long()
    words = marks.to(torch.int64) & 0xFFFF  # also where a method calls the 16 bits int16
    return words[:, 0] + (words[:, 1] << 16)


def peak_rss_bytes() -> int:
    """Of this process; its workers are not in it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
