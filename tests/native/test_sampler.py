"""The sampler asks at moments of its own, and counts the answers."""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections.abc import Callable

import pytest

from stormtorch.native.library import SamplerCounts, library

_ASK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)


def sampled(
    answer: Callable[[int | None], int],
    *,
    no: int = 600,
    launch_ns: int = 10_000_000,
    seconds: float = 0.5,
    enough: Callable[[SamplerCounts], bool] = lambda _counts: True,
) -> SamplerCounts:
    """What was counted while ``answer`` was asked, first about 7, then about 8; for longer where that is not enough."""
    native = library()
    if native is None:
        pytest.skip("installed without the C library")
    ask, handle = _ASK(answer), ctypes.c_void_p()
    address = ctypes.cast(ask, ctypes.c_void_p).value
    given = (address, no, None, None, None, 7, 1_000_000, launch_ns)
    assert native.c.storm_sampler_open(*given, ctypes.byref(handle)) == 0
    time.sleep(seconds / 2)
    native.c.storm_sampler_watch(handle, 8)
    time.sleep(seconds / 2)
    counts, until_s = SamplerCounts(), time.monotonic() + 60
    while True:
        native.c.storm_sampler_read(handle, ctypes.byref(counts))
        if enough(counts) or time.monotonic() > until_s:
            break
        time.sleep(0.05)
    native.c.storm_sampler_close(handle)
    return counts


def test_answers_are_counted() -> None:
    subjects: list[int | None] = []

    def answer(subject: int | None) -> int:
        subjects.append(subject)
        return 0 if time.perf_counter() % 0.02 < 0.005 else 600

    counts = sampled(answer, enough=lambda counts: counts.asked > 300)
    assert 0.15 < counts.idle_ns / counts.counted_ns < 0.35
    assert subjects[0] == 7
    assert subjects[-1] == 8


def test_an_error_ends_it() -> None:
    numbers = itertools.count()
    sampled(lambda _subject: 999 if next(numbers) == 17 else 0)
    assert next(numbers) == 18


def test_samples_count_by_time() -> None:
    """A GPU that has work for 30 of 40 ms, in which a question waits for as long: few samples, but much time."""

    def answer(_subject: int | None) -> int:
        place_s = time.perf_counter() % 0.04
        if place_s < 0.03:
            time.sleep(0.03 - place_s)
            return 600
        return 0

    counts = sampled(answer, launch_ns=1_000_000, enough=lambda counts: counts.counted_ns > 10**9)
    assert counts.idle_ns / counts.counted_ns < 0.4


def test_questions_that_wait_for_a_launch_are_told_apart() -> None:
    """A GPU that computes for 4 of 10 ms; before that comes a launch of 3 ms, in which the driver answers nothing."""

    def answer(_subject: int | None) -> int:
        asked_s = time.perf_counter()
        while time.perf_counter() < asked_s + 1e-4:
            pass  # beside which what Python takes is little
        place_s = time.perf_counter() % 0.01
        if place_s < 0.003:
            time.sleep(0.003 - place_s)
            return 600
        return 600 if place_s < 0.007 else 0

    counts = sampled(answer, enough=lambda counts: counts.stops > 20)
    # All of them on a quiet machine; a thread that had to wait for a core looks blocked too.
    assert counts.stops > 0.3 * counts.launches
    assert 0.3 < counts.stops / (counts.exposed_ns / 1e7) < 1.5  # one in 10 ms


def test_a_gpu_with_work_ahead_has_no_launches_onto_idle() -> None:
    """The same launches, while the GPU is busy all the time."""

    def answer(_subject: int | None) -> int:
        asked_s = time.perf_counter()
        while time.perf_counter() < asked_s + 1e-4:
            pass
        place_s = time.perf_counter() % 0.01
        time.sleep(max(0.0, 0.003 - place_s))
        return 600

    counts = sampled(answer, enough=lambda counts: counts.launches > 20)
    assert counts.launches > 20
    assert (counts.stops, counts.idle_ns) == (0, 0)


def test_questions_that_take_longer_than_a_launch_are_believed() -> None:
    """As behind a launch that waits for room in the queue of the GPU: the answer is how the GPU is."""
    numbers = itertools.count()

    def answer(_subject: int | None) -> int:
        if next(numbers) >= 7:  # the first ones show how short a question can be
            time.sleep(0.005)
        return 600

    counts = sampled(answer, launch_ns=1_000_000, enough=lambda counts: counts.asked >= 20)
    assert counts.asked >= 20
    assert counts.launches <= 5


def test_bad_arguments_are_refused() -> None:
    native = library()
    if native is None:
        pytest.skip("installed without the C library")
    handle = ctypes.c_void_p()
    assert native.c.storm_sampler_open(None, 0, None, None, None, None, 1, 1, ctypes.byref(handle)) < 0
    assert native.c.storm_sampler_open(os.getpid(), 0, None, None, None, None, 0, 1, ctypes.byref(handle)) < 0
