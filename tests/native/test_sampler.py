"""The sampler asks at moments of its own, and counts the answers."""

from __future__ import annotations

import ctypes
import os
import time

import pytest

from stormtorch.native.library import library

_ASK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)


def sampled(answers: list[int], *, no: int = 600, seconds: float = 0.5) -> tuple[int, int, list[int | None]]:
    """How often it was asked, how often the answer was yes, and about what; ``answers`` come in turn."""
    native = library()
    if native is None:
        pytest.skip("installed without the C library")
    subjects: list[int | None] = []

    def answer(subject: int | None) -> int:
        subjects.append(subject)
        return answers[(len(subjects) - 1) % len(answers)]

    ask, handle = _ASK(answer), ctypes.c_void_p()
    address = ctypes.cast(ask, ctypes.c_void_p).value
    assert native.c.storm_sampler_open(address, no, None, None, None, 7, 1_000_000, ctypes.byref(handle)) == 0
    time.sleep(seconds / 2)
    native.c.storm_sampler_watch(handle, 8)
    time.sleep(seconds / 2)
    asked, yes = ctypes.c_int64(), ctypes.c_int64()
    native.c.storm_sampler_read(handle, ctypes.byref(asked), ctypes.byref(yes))
    native.c.storm_sampler_close(handle)
    return asked.value, yes.value, subjects


def test_answers_are_counted() -> None:
    asked, yes, subjects = sampled([0, 600, 600, 600])
    assert asked > 10
    assert abs(yes - asked / 4) <= 1
    assert subjects[0] == 7
    assert subjects[-1] == 8


def test_an_error_ends_it() -> None:
    asked, yes, subjects = sampled([600, 0, 999])
    assert (asked, yes, len(subjects)) == (2, 1, 3)


def test_bad_arguments_are_refused() -> None:
    native = library()
    if native is None:
        pytest.skip("installed without the C library")
    handle = ctypes.c_void_p()
    assert native.c.storm_sampler_open(None, 0, None, None, None, None, 1, ctypes.byref(handle)) < 0
    assert native.c.storm_sampler_open(os.getpid(), 0, None, None, None, None, 0, ctypes.byref(handle)) < 0
