"""The worker: order, gating, ending. Every test runs on the native pool and on the Python thread."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stormtorch.core.errors import LaneError
from stormtorch.native.adamw import adamw_
from stormtorch.native.library import library
from stormtorch.native.update import AdamStep, AdamTensors
from stormtorch.native.worker.jobs import Worker
from stormtorch.native.worker.open import open_worker

from ..drained import drained

MakeTensors = Callable[..., AdamTensors]
OpenAny = Callable[..., Worker]
STEP = AdamStep(lr=1e-2, step=3)


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True


def test_a_job_does_what_the_blocking_call_does(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    worker = open_any(threads=2)
    for weight in (torch.float32, torch.bfloat16, torch.float16):
        tensors, expected = make_tensors(100_003, weight), make_tensors(100_003, weight)
        words[0] = 0
        worker.submit(tensors, STEP, done=words.at(0, 5))
        assert until(lambda: words[0] == 5)
        adamw_(expected, STEP)
        assert torch.equal(tensors.weight, expected.weight)
        assert torch.equal(tensors.exp_avg_sq, expected.exp_avg_sq)


def test_priority_then_order_of_submission(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    """All jobs change the same tensors, one thread runs them, and the result depends on the order."""
    worker = open_any(threads=1)
    order = [(3, 0.1), (1, 0.7), (2, -0.4), (1, 0.2), (3, 0.9), (0, -0.6)]
    steps = [(priority, AdamStep(lr=1e-2, step=2, grad_scale=scale)) for priority, scale in order]
    tensors = make_tensors(1000)
    for priority, step in steps:
        worker.submit(tensors, step, priority=priority, ready=words.at(0))
    time.sleep(0.02)
    words[0] = 1
    assert drained(worker, 20)

    def in_order(wanted: list[tuple[int, AdamStep]]) -> torch.Tensor:
        expected = make_tensors(1000)
        for _, step in wanted:
            adamw_(expected, step)
        return expected.weight

    assert torch.equal(tensors.weight, in_order(sorted(steps, key=lambda item: item[0])))
    assert not torch.equal(tensors.weight, in_order(steps))


def test_an_urgent_job_overtakes(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    worker = open_any(threads=1)
    large, small = make_tensors(1 << 21), make_tensors(10)
    turns = 10 if library() is None else 40  # a tenth of a second of work, at either's speed
    for _ in range(turns):
        worker.submit(large, STEP, priority=5)
    worker.submit(small, STEP, priority=1, ready=words.at(0), done=words.at(1))
    assert until(lambda: worker.stats().elements > 0)
    words[0] = 1
    assert until(lambda: words[1] == 1)
    stats = worker.stats()
    assert stats.pending > 0
    assert stats.finished < turns
    assert drained(worker, 60)
    assert worker.stats().finished == turns + 1


def test_nothing_happens_before_the_flag(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    worker = open_any()
    tensors, before = make_tensors(1000), make_tensors(1000)
    words[0] = 8
    worker.submit(tensors, STEP, ready=words.at(0, 9), done=words.at(1))
    assert not drained(worker, 0.05)
    assert torch.equal(tensors.weight, before.weight)
    assert words[1] == 0
    words[0] = 9
    assert drained(worker, 20)
    assert words[1] == 1
    assert not torch.equal(tensors.weight, before.weight)


def test_a_waiting_job_does_not_hold_up_a_ready_one(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    worker = open_any(threads=1)
    worker.submit(make_tensors(10), STEP, priority=0, ready=words.at(0), done=words.at(1))
    worker.submit(make_tensors(10), STEP, priority=9, done=words.at(2))
    assert until(lambda: words[2] == 1)
    assert words[1] == 0
    words[0] = 1
    assert drained(worker, 20)


def test_flags_count_round_the_end(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    worker = open_any()
    words[0] = 0xFFFFFFFE
    worker.submit(make_tensors(10), STEP, ready=words.at(0, 2), done=words.at(1, 1 << 32 | 7))
    assert not drained(worker, 0.03)
    words[0] = 3
    assert drained(worker, 20)
    assert words[1] == 7


def test_many_jobs(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    worker = open_any(threads=3)
    jobs = [make_tensors(random.Random(i).randrange(0, 3000), seed=i) for i in range(300)]
    for index, tensors in enumerate(jobs):
        gate = words.at(900 + index % 7) if index % 3 else None
        worker.submit(tensors, STEP, priority=index % 11, ready=gate, done=words.at(index))
    for gate in range(7):
        words[900 + gate] = 1
    assert drained(worker, 60)
    assert [words[i] for i in range(300)] == [1] * 300
    for index in range(0, 300, 37):
        expected = make_tensors(jobs[index].numel, seed=index)
        adamw_(expected, STEP)
        assert torch.equal(jobs[index].weight, expected.weight)
    stats = worker.stats()
    assert (stats.finished, stats.pending, stats.abandoned) == (300, 0, 0)
    assert stats.elements == sum(tensors.numel for tensors in jobs)
    assert stats.busy_s > 0


def test_many_submitters(open_any: OpenAny, make_tensors: MakeTensors) -> None:
    worker = open_any(threads=2)
    tickets: list[int] = []

    def submit_some(seed: int) -> None:
        for i in range(50):
            tickets.append(worker.submit(make_tensors(100, seed=seed * 50 + i), STEP, priority=i % 3))

    threads = [threading.Thread(target=submit_some, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drained(worker, 60)
    assert sorted(tickets) == list(range(1, 201))
    assert worker.stats().finished == 200


def test_tensors_live_as_long_as_their_job(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    worker = open_any()
    held = make_tensors(1000)
    alive = weakref.ref(held)
    worker.submit(held, STEP, ready=words.at(0))
    del held
    gc.collect()
    assert alive() is not None
    words[0] = 1
    assert drained(worker, 20)
    assert until(lambda: gc.collect() >= 0 and alive() is None, 5)


def test_references_do_not_pile_up(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    worker = open_any()
    alive: list[weakref.ref[AdamTensors]] = []
    for turn in range(1, 201):
        tensors = make_tensors(10)
        alive.append(weakref.ref(tensors))
        worker.submit(tensors, STEP, done=words.at(0, turn))
        del tensors
        assert until(lambda turn=turn: words[0] == turn)  # type: ignore[misc]
    assert sum(reference() is not None for reference in alive) <= 3


def test_close_abandons_what_never_began(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    worker = open_any(threads=2)
    jobs = [make_tensors(1000, seed=i) for i in range(20)]
    for index, tensors in enumerate(jobs):
        worker.submit(tensors, STEP, ready=words.at(500), done=words.at(index, 77))
    assert worker.close() == 20
    assert [words[i] for i in range(20)] == [77] * 20
    assert torch.equal(jobs[4].weight, make_tensors(1000, seed=4).weight)
    assert worker.close() == 20
    assert worker.stats().abandoned == 20
    assert drained(worker, 0)
    with pytest.raises(LaneError, match="closed"):
        worker.submit(jobs[0], STEP)


def test_close_finishes_what_began(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    count = (2 if library() is None else 8) << 20
    expected = make_tensors(count)
    adamw_(expected, STEP)
    for _ in range(20):
        worker = open_any(threads=1)
        begun = make_tensors(count)
        words[0] = words[1] = 0
        worker.submit(begun, STEP, done=words.at(0))
        worker.submit(make_tensors(10), STEP, ready=words.at(9), done=words.at(1))
        while worker.stats().elements == 0:
            pass  # no sleep: the job takes milliseconds
        was_at_work = words[0] == 0
        assert worker.close() == 1
        assert (words[0], words[1]) == (1, 1)
        assert torch.equal(begun.weight, expected.weight)
        if was_at_work:
            return
    pytest.fail("the job was over before we looked, twenty times")


def test_a_worker_that_is_dropped_writes_its_flags(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    open_any()  # chooses the kind; only this test holds the one below
    worker = open_worker()
    tensors = make_tensors(10)
    alive = weakref.ref(tensors)
    worker.submit(tensors, STEP, ready=words.at(0), done=words.at(1))
    del worker, tensors
    gc.collect()
    assert words[1] == 1
    assert until(lambda: gc.collect() >= 0 and alive() is None, 5)


def test_with_statement_closes(open_any: OpenAny, make_tensors: MakeTensors) -> None:
    with open_any() as worker:
        worker.submit(make_tensors(10), STEP)
        assert drained(worker, 20)
    with pytest.raises(LaneError):
        worker.submit(make_tensors(10), STEP)
