"""The worker and its flags: done flags never run backwards, abort flags drop what has not begun, owners stay alive."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stormtorch.native.library import library
from stormtorch.native.update import AdamStep, AdamTensors
from stormtorch.native.worker.jobs import FlagValue, Worker

from ..drained import drained

MakeTensors = Callable[..., AdamTensors]
OpenAny = Callable[..., Worker]
STEP = AdamStep(lr=1e-2, step=3)


def begin_a_long_job(worker: Worker, make_tensors: MakeTensors, **flags: FlagValue) -> AdamTensors:
    """Milliseconds of work, at either's speed; begun when this returns."""
    tensors = make_tensors((2 if library() is None else 8) << 20)
    worker.submit(tensors, STEP, priority=-1, **flags)
    while worker.stats().elements == 0:
        pass
    return tensors


def test_close_does_not_take_back_a_later_value(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    """The abandoned job is over at once, the begun one later, and a GPU may wait for the value of the abandoned one."""
    worker = open_any(threads=1)
    begin_a_long_job(worker, make_tensors, done=words.at(0, 1))
    worker.submit(make_tensors(10), STEP, ready=words.at(1), done=words.at(0, 2))
    assert worker.close() == 1
    assert words[0] == 2


def test_abandoned_jobs_leave_the_furthest_value(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    for _ in range(20):
        worker = open_any(threads=1)
        words[0] = 0
        begin_a_long_job(worker, make_tensors)
        worker.submit(make_tensors(10), STEP, ready=words.at(1), done=words.at(0, 3))
        worker.submit(make_tensors(10), STEP, done=words.at(0, 1))
        worker.submit(make_tensors(10), STEP, ready=words.at(1), done=words.at(0, 2))
        abandoned = worker.close()
        assert words[0] == 3
        if abandoned == 3:
            return
    pytest.fail("the long job was over before the worker was closed, twenty times")


def test_abort_ends_what_waits(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    worker = open_any(threads=2)
    jobs = [make_tensors(1000, seed=seed) for seed in range(5)]
    for index, tensors in enumerate(jobs):
        worker.submit(tensors, STEP, ready=words.at(9), done=words.at(index, 4), abort=words.at(8))
    other = make_tensors(1000)
    worker.submit(other, STEP, ready=words.at(10), done=words.at(7), abort=words.at(11))
    assert not drained(worker, 0.03)
    words[8] = 1
    while worker.stats().pending > 1:
        time.sleep(0.001)
    assert [words[index] for index in range(5)] == [4] * 5
    assert torch.equal(jobs[3].weight, make_tensors(1000, seed=3).weight)
    words[10] = 1
    assert drained(worker, 20)
    stats = worker.stats()
    assert (stats.abandoned, stats.finished) == (5, 1), "the other board was not aborted"
    worker.submit(make_tensors(10), STEP, done=words.at(20))
    assert drained(worker, 20)
    assert words[20] == 1, "a worker outlives an abort"


def test_a_gradient_that_comes_after_the_abort_is_not_used(
    open_any: OpenAny, make_tensors: MakeTensors, words: Any
) -> None:
    worker = open_any(threads=2)
    before = make_tensors(10)
    for turn in range(1, 101):
        tensors = make_tensors(10)
        worker.submit(tensors, STEP, ready=words.at(0, turn), done=words.at(2, turn), abort=words.at(1, turn))
        words.at(1, turn).write()
        words.at(0, turn).write()  # what a GPU does once its waits were let pass
        assert drained(worker, 20)
        assert torch.equal(tensors.weight, before.weight)
        assert words[2] == turn
    assert worker.stats().abandoned == 100


def test_a_ready_job_is_dropped_and_a_begun_one_finished(
    open_any: OpenAny, make_tensors: MakeTensors, words: Any
) -> None:
    worker = open_any(threads=1)
    begun = begin_a_long_job(worker, make_tensors, done=words.at(0, 1), abort=words.at(2))
    ready, before = make_tensors(10), make_tensors(10)
    worker.submit(ready, STEP, done=words.at(0, 2), abort=words.at(2))
    words[2] = 1
    assert worker.stats().finished == 0
    assert drained(worker, 60)
    stats = worker.stats()
    assert (stats.finished, stats.abandoned, stats.elements) == (1, 1, begun.numel)
    assert torch.equal(ready.weight, before.weight)
    assert words[0] == 2


def test_what_is_submitted_after_the_abort_never_runs(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    worker = open_any()
    words[0] = 1
    worker.submit(make_tensors(10), STEP, done=words.at(1), abort=words.at(0))
    assert drained(worker, 20)
    assert (worker.stats().abandoned, words[1]) == (1, 1)


def test_owners_of_flags_live_as_long_as_the_job(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    class Board:
        def __init__(self) -> None:
            self.word = torch.zeros(1, dtype=torch.int32)

        def at(self, value: int) -> FlagValue:
            return FlagValue(self.word.data_ptr(), value, owner=self)

    worker = open_any()
    ready, done, abort = (Board() for _ in range(3))
    alive = [weakref.ref(board) for board in (ready, done, abort)]
    worker.submit(
        make_tensors(10), STEP, ready=FlagValue(words.at(0).address, 1, ready), done=done.at(1), abort=abort.at(1)
    )
    del ready, done, abort
    gc.collect()
    assert all(board() is not None for board in alive)
    words[0] = 1
    assert drained(worker, 20)
    end = time.monotonic() + 300
    while any(board() is not None for board in alive) and time.monotonic() < end:
        worker.stats()
        time.sleep(0.001)
    assert not any(board() is not None for board in alive)


def test_an_owner_has_no_part_in_what_a_flag_means() -> None:
    assert FlagValue(64, 1, owner=object()) == FlagValue(64, 1)
    assert repr(FlagValue(64, 1, owner=object())) == "FlagValue(address=64, value=1)"
