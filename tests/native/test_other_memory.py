"""Updates into other memory than they read, and copies of weights, on either worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stormtorch.native.adamw import adamw_
from stormtorch.native.library import Library
from stormtorch.native.update import AdamStep, AdamTensors, WeightCopy
from stormtorch.native.worker.jobs import Worker

from ..drained import drained

MakeTensors = Callable[..., AdamTensors]
OpenAny = Callable[..., Worker]
STEP = AdamStep(lr=1e-2, step=3)
COUNT = 100_003  # several runs of a thread, and a rest
UPDATED = ("weight", "master", "exp_avg", "exp_avg_sq")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def elsewhere(tensors: AdamTensors) -> AdamTensors:
    """The same gradient, and memory of its own full of garbage for all else."""
    made = {name: getattr(tensors, name) for name in UPDATED}
    fresh: Any = {name: torch.full_like(tensor, 77) for name, tensor in made.items() if tensor is not None}
    return AdamTensors(grad=tensors.grad, **fresh)


def equal(first: AdamTensors, second: AdamTensors) -> bool:
    pairs = [(getattr(first, name), getattr(second, name)) for name in UPDATED]
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("weight", DTYPES, ids=str)
def test_what_is_read_stays_as_it_is(
    weight: torch.dtype, open_any: OpenAny, make_tensors: MakeTensors, words: Any
) -> None:
    source, before, expected = (make_tensors(COUNT, weight) for _ in range(3))
    target = elsewhere(source)
    worker = open_any(threads=2)
    worker.submit(target.made_from(source), STEP, done=words.at(0))
    assert drained(worker, 20)
    adamw_(expected, STEP)
    assert words[0] == 1
    assert equal(target, expected)
    assert equal(source, before)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_blocking_call(threads: int, make_tensors: MakeTensors, native: Library) -> None:  # noqa: ARG001
    source, expected = make_tensors(300_001, torch.bfloat16), make_tensors(300_001, torch.bfloat16)
    target = elsewhere(source)
    adamw_(target.made_from(source), STEP, threads=threads)
    adamw_(expected, STEP)
    assert equal(target, expected)


@pytest.mark.parametrize("weight", DTYPES, ids=str)
def test_a_copy_waits_for_both_flags(
    weight: torch.dtype, open_any: OpenAny, make_tensors: MakeTensors, words: Any
) -> None:
    source, target = make_tensors(COUNT, weight).weight, torch.zeros(COUNT, dtype=weight)
    worker = open_any(threads=2)
    for last in (0, 1):
        words[0] = words[1] = words[2] = 0
        target.zero_()
        copy = WeightCopy(target, source)
        worker.copy(copy, priority=0, ready=words.at(0), also=words.at(1), done=words.at(2))
        words[1 - last] = 1
        time.sleep(0.01)
        assert not target.any()
        assert words[2] == 0
        words[last] = 1
        assert drained(worker, 20)
        assert torch.equal(target, source)
        assert words[2] == 1
    assert worker.stats().elements == 0  # they say nothing of the rate of updates


def test_a_copy_that_is_aborted(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    source, target = make_tensors(1000).weight, torch.zeros(1000)
    worker, flags = open_any(threads=1), {"ready": words.at(0), "also": None, "done": words.at(1), "abort": words.at(2)}
    words[2] = 1
    dropped, kept = set[int](), torch.zeros(1000)
    ticket = worker.copy(WeightCopy(target, source), priority=0, dropped=dropped, **flags)
    flags["abort"] = None
    worker.copy(WeightCopy(kept, source), priority=1, dropped=dropped, **flags)
    words[0] = 1
    assert drained(worker, 20)
    never = worker.copy(
        WeightCopy(target, source), priority=0, ready=words.at(5), also=None, done=None, dropped=dropped
    )
    worker.close()
    assert words[1] == 1
    assert not target.any()
    assert torch.equal(kept, source)
    assert dropped == {ticket, never}
