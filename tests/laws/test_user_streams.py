"""Activations that leave and come back while user code computes on several CUDA streams.

Torch hands freed memory out again to the stream that allocated it, at once. Code that lets go of memory that a lane
still reads or writes must therefore wait for the lane, whatever stream happens to be current."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from stormtorch.core.sizes import MiB
from stormtorch.session.offload import OffloadedActivations
from stormtorch.streams.activations.offloading.offloaded import Note, Offloaded
from stormtorch.streams.settings import Trial

SIZE, COUNT = 1 << 20, 12
SLEEP = 300_000_000  # cycles: a tenth of a second or more


class Slow:
    """Makes lanes late, as long as it is switched on."""

    def __init__(self) -> None:
        self.on = False

    def __call__(self) -> None:
        if self.on:
            torch.cuda._sleep(SLEEP)


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def activations(slow: Slow) -> Iterator[OffloadedActivations]:
    opened = OffloadedActivations(None, "offload", 64 * MiB, "auto", "cuda", trial=Trial(delay=slow, small_bytes=1))
    yield opened
    torch.cuda.synchronize()
    opened.close()


def taken_again(count: int = 3 * COUNT) -> list[torch.Tensor]:
    """Memory of the stream that is current: what it has free is taken, and written over."""
    return [torch.full((SIZE,), 777.0, device="cuda") for _ in range(count)]


@pytest.mark.gpu
def test_memory_that_another_stream_allocated_leaves_before_it_is_free(
    activations: OffloadedActivations, slow: Slow
) -> None:
    """Saved on the second stream, allocated by the first one: that one does not wait for what leaves."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    leaf = torch.randn(SIZE, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        made = [leaf * (number + 1) for number in range(COUNT)]
    second.wait_stream(first)
    expected = torch.stack([(number + 1) * ((number + 1) * leaf.detach()).cos() for number in range(COUNT)]).sum(0)
    torch.cuda.synchronize()
    slow.on = True
    with torch.cuda.stream(second), activations:
        loss = sum((made.pop().sin() for _ in range(COUNT)), torch.zeros(SIZE, device="cuda")).sum()
    with torch.cuda.stream(first):
        others = taken_again()
    torch.cuda.synchronize()
    slow.on = False
    with torch.cuda.stream(second):
        loss.backward()
    torch.cuda.synchronize()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-4, atol=1e-3)
    assert all(bool((other == 777.0).all()) for other in others)


@pytest.mark.gpu
def test_a_load_that_is_not_wanted_any_more_writes_into_nobodys_memory(
    activations: OffloadedActivations, slow: Slow
) -> None:
    """A graph is dropped while its activations come back; the next pass, on another stream, lets go of their memory."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    leaf = torch.randn(SIZE, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        with activations:
            hidden = [leaf.sin()]
            for _ in range(COUNT):
                hidden.append(hidden[-1].sin())
            loss = hidden[-1].sum()
        torch.cuda.synchronize()
        slow.on = True
        torch.autograd.grad(loss, hidden[-3], retain_graph=True)  # what comes next is on its way now
    del hidden, loss
    gc.collect()
    with torch.cuda.stream(second), activations:
        pass
    with torch.cuda.stream(first):
        others = taken_again()
    torch.cuda.synchronize()
    slow.on = False
    assert all(bool((other == 777.0).all()) for other in others)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("streams", [1, 2, 3])
def test_passes_that_take_turns_on_streams(streams: int, activations: OffloadedActivations, slow: Slow) -> None:
    slow.on = streams > 1
    turns = [torch.cuda.Stream() for _ in range(streams)]
    leaf = torch.randn(SIZE, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    expected: list[Any] = []
    for number in range(2 * streams):
        with torch.cuda.stream(turns[number % streams]):
            for context in (None, activations):
                leaf.grad = None
                y = leaf * (number + 1)
                if context is None:
                    for _ in range(4):
                        y = y.sin()
                else:
                    with context:
                        for _ in range(4):
                            y = y.sin()
                y.sum().backward()
                expected.append(leaf.grad)
        torch.cuda.synchronize()
        assert torch.equal(expected[-1], expected[-2]), f"pass {number}"


def test_notes_that_end_on_any_thread_are_counted_right() -> None:
    """Finalizers run on every thread, in the middle of anything: a count that two of them change at once goes wrong."""
    offloaded: Any = object.__new__(Offloaded)
    kept: list[list[Note]] = [[], []]
    interval = sys.getswitchinterval()
    prepare: Callable[[Any], None] = _prepared
    prepare(offloaded)
    tensor = torch.zeros(4)
    for notes in kept:
        notes.extend(Note(offloaded, tensor) for _ in range(5000))
    try:
        sys.setswitchinterval(1e-6)
        threads = [threading.Thread(target=notes.clear) for notes in kept]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert offloaded.has_served_all()
    assert offloaded.notes == 0


def _prepared(offloaded: Any) -> None:
    from collections import deque

    offloaded._bury = lambda _offloaded: None
    offloaded.first = offloaded.notes = offloaded.served = offloaded.arrivals = 0
    offloaded.ended = deque()
