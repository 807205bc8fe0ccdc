from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stormtorch.core.errors import LaneError, StorageError
from stormtorch.core.tags import Tag
from stormtorch.memory.books.ledger import Ledger
from stormtorch.memory.host.pinning import page_lock_for
from stormtorch.memory.lanes.build import open_lanes
from stormtorch.memory.lanes.flags import Flag, Flags
from stormtorch.native.flag_words import has_reached
from stormtorch.native.update import AdamStep, AdamTensors
from stormtorch.native.worker.open import open_worker

from ..drained import drained


@given(st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 31) - 1))
def test_the_comparison_is_cyclic(value: int, ahead: int) -> None:
    assert has_reached((value + ahead) & 0xFFFFFFFF, value)
    assert not has_reached((value - 1 - ahead) & 0xFFFFFFFF, value)


def test_flags_start_at_zero_a_cache_line_apart(ledger: Ledger, device: torch.device) -> None:
    flags = Flags(5, ledger=ledger, device=device, page_lock=page_lock_for(device))
    assert [flag.read() for flag in (flags[i] for i in range(len(flags)))] == [0] * 5
    assert flags[1].address - flags[0].address == 64
    assert flags[0].address % 64 == 0
    flags[3].set(0x7FFFFFFF)
    flags[3].set(5)
    assert flags[3].read() == 0x7FFFFFFF, "a flag only counts up"
    assert flags[2].read() == flags[4].read() == 0
    flags.close()


def test_wait_returns_when_another_thread_sets_it(ledger: Ledger) -> None:
    flags = Flags(1, ledger=ledger, device=torch.device("cpu"))
    assert not flags[0].wait(1, timeout_s=0.01)
    timer = threading.Timer(0.05, flags[0].set, [2])
    timer.start()
    start = time.perf_counter()
    assert flags[0].wait(1, timeout_s=30)
    assert 0.01 < time.perf_counter() - start < 25
    timer.join()
    assert flags[0].wait(2)
    flags.close()


def test_abort_lets_every_waiter_go_and_they_raise(ledger: Ledger) -> None:
    flags = Flags(2, ledger=ledger, device=torch.device("cpu"))
    caught: list[BaseException] = []

    def waits(index: int) -> None:
        try:
            flags[index].wait(9)
        except LaneError as error:
            caught.append(error)

    threads = [threading.Thread(target=waits, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    flags.abort(RuntimeError("the worker died"))
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert len(caught) == 2
    assert all("the worker died" in str(error) for error in caught)
    with pytest.raises(LaneError):
        flags[0].set(1)
    with pytest.raises(LaneError):
        flags[0].wait(0)
    flags.close()


def test_an_abort_beside_a_watch_has_its_own_error(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread aborts between the two looks of `is_aborted`: no native thread has failed then."""
    flags = Flags(1, ledger=ledger, device=torch.device("cpu"))
    flags.watch(lambda: pytest.fail("no native thread has failed"))
    read = Flag.read

    def aborted_meanwhile(flag: Flag) -> int:
        thread = threading.Thread(target=flags.abort, args=(RuntimeError("a lane has failed"),))
        thread.start()
        thread.join()
        return read(flag)

    monkeypatch.setattr(Flag, "read", aborted_meanwhile)
    with pytest.raises(LaneError, match="a lane has failed"):
        flags.raise_if_aborted()
    flags.close()


def test_a_board_that_a_native_thread_aborts_says_why(ledger: Ledger) -> None:
    flags = Flags(1, ledger=ledger, device=torch.device("cpu"))
    flags.watch(lambda: None)  # of a worker that did not do it
    flags.watch(lambda: StorageError("the disk is gone"))
    flags.raise_if_aborted()
    flags.aborted.at(1).write()
    with pytest.raises(StorageError, match="the disk is gone"):
        flags[0].set(1)
    flags.close()


def test_a_closed_board_is_still_safe_to_look_at(ledger: Ledger) -> None:
    flags = Flags(1, ledger=ledger, device=torch.device("cpu"))
    flag = flags[0]
    flags.close()
    flags.close()
    assert flag.read() == 0
    with pytest.raises(LaneError, match="closed"):
        flag.set(1)


def test_abort_drops_the_jobs_that_wait_for_the_board(ledger: Ledger) -> None:
    """Their gradients never came: they must neither be used nor be waited for."""
    flags = Flags(2, ledger=ledger, device=torch.device("cpu"))
    tensors = AdamTensors(**{name: torch.ones(100) for name in ("weight", "exp_avg", "exp_avg_sq", "grad")})
    with open_worker() as worker:
        worker.submit(
            tensors,
            AdamStep(lr=0.1, step=1),
            ready=flags[0].at(1),
            done=flags[1].at(1),
            abort=flags.aborted.at(1),
        )
        assert not drained(worker, 0.05)
        flags.abort(RuntimeError("the loop ended"))
        assert drained(worker, 30)
        assert worker.stats().abandoned == 1
    assert bool((tensors.weight == 1).all())
    assert flags[1].read() == 1, "a stream that waits for the update goes on"
    flags.close()


@pytest.mark.gpu
def test_abort_frees_a_gpu_that_waits(ledger: Ledger) -> None:
    device = torch.device("cuda", 0)
    flags = Flags(1, ledger=ledger, device=device, page_lock=page_lock_for(device))
    assert flags.on_stream, "this driver should support stream memory operations"
    lanes = open_lanes(device)
    there, home = torch.empty(10, device=device), torch.ones(10).pin_memory()  # now: it may wait for the whole device
    lanes.load.wait_flag(flags[0], 5)
    lanes.load.copy(there, home, Tag.DATA)
    event = lanes.load.record()
    time.sleep(0.05)
    assert not event.done()
    flags.abort(RuntimeError("gone"))
    event.synchronize()
    with pytest.raises(LaneError, match="gone"):
        lanes.load.wait_flag(flags[0], 6)
    lanes.close()
    flags.close()
