"""The worker and its surroundings: idle CPU time, thread names and cores, fork, exit, an error in the fallback."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stormtorch.core.errors import LaneError
from stormtorch.native import fallback
from stormtorch.native.library import Library
from stormtorch.native.update import AdamStep, AdamTensors
from stormtorch.native.worker.c_worker import CPool
from stormtorch.native.worker.jobs import Worker
from stormtorch.native.worker.open import open_worker

from ..drained import drained
from ..forkserver import run

MakeTensors = Callable[..., AdamTensors]
OpenAny = Callable[..., Worker]
STEP = AdamStep(lr=1e-2, step=3)


def cpu_seconds_while_sleeping(seconds: float) -> float:
    before = time.process_time()
    time.sleep(seconds)
    return time.process_time() - before


def test_an_idle_worker_burns_nothing(open_any: OpenAny, make_tensors: MakeTensors) -> None:
    worker = open_any(threads=8)
    worker.submit(make_tensors(10), STEP)
    assert drained(worker, 20)
    time.sleep(0.2)  # torch's own threads spin for a while after an operation
    assert cpu_seconds_while_sleeping(0.3) < 0.01


def test_one_thread_polls_and_the_others_sleep(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    worker = open_any(threads=8)
    worker.submit(make_tensors(10), STEP, ready=words.at(0))
    time.sleep(0.2)
    assert cpu_seconds_while_sleeping(0.4) < 0.2
    words[0] = 1
    assert drained(worker, 20)


def test_threads_have_names_and_cores(native: Library) -> None:
    def ours() -> set[int]:
        found = set()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it may end while we look
                if (task / "comm").read_text().startswith("storm-adam"):
                    found.add(int(task.name))
        return found

    already = ours()
    core = max(os.sched_getaffinity(0))
    with Worker(CPool(native, threads=3, cores=[core])) as worker:
        threads = ours() - already
        assert len(threads) == worker.threads == 3
        assert all(os.sched_getaffinity(thread) == {core} for thread in threads)
    end = time.monotonic() + 300
    while ours() - already and time.monotonic() < end:
        time.sleep(0.001)  # the kernel removes a thread a little after it was joined
    assert not ours() - already


def test_a_forked_child_is_refused(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    worker = open_any()
    tensors = make_tensors(10)
    worker.submit(tensors, STEP, ready=words.at(0), done=words.at(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads here; that is the test
        child = os.fork()
    if child == 0:
        outcome = 1
        try:
            worker.submit(tensors, STEP)
        except LaneError as error:
            outcome = 0 if "fork" in str(error) and worker.close() == 0 else 2
        finally:
            os._exit(outcome)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert words[1] == 0
    words[0] = 1
    assert drained(worker, 20)


EXIT = """
import torch
from stormtorch.native import library
if {hidden}:
    library._load = lambda: "hidden by a test"
from stormtorch.native.update import AdamStep, AdamTensors
from stormtorch.native.worker.jobs import FlagValue
from stormtorch.native.worker.open import open_worker
word = torch.zeros(1, dtype=torch.int32)
worker = open_worker(threads=2)
tensors = AdamTensors(**{{name: torch.zeros(9) for name in ("weight", "exp_avg", "exp_avg_sq", "grad")}})
worker.submit(tensors, AdamStep(lr=1.0, step=1), ready=FlagValue(word.data_ptr(), 1))
print("leaving")
"""


@pytest.mark.parametrize("hidden", [False, True], ids=["native", "fallback"])
def test_the_interpreter_exits_with_jobs_waiting(hidden: bool) -> None:
    start = subprocess.run if hidden else run  # hidden before anything has loaded it
    done = start(
        [sys.executable, "-c", EXIT.format(hidden=hidden)], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "leaving\n"


@pytest.mark.usefixtures("no_library")
def test_an_error_in_the_fallback_surfaces(
    make_tensors: MakeTensors, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(fallback, "update_", fail)
    worker = open_worker()
    worker.submit(make_tensors(10), STEP, priority=2, ready=words.at(5), done=words.at(0))
    worker.submit(make_tensors(10), STEP, priority=1, done=words.at(1))
    assert drained(worker)
    with pytest.raises(LaneError, match="no memory left") as caught:
        worker.submit(make_tensors(10), STEP)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (words[0], words[1]) == (1, 1), "a GPU that waits for a flag must not wait for ever"
    with pytest.raises(LaneError, match="no memory left"):
        worker.submit(make_tensors(10), STEP)
    assert worker.close() == 2


@pytest.mark.usefixtures("no_library")
def test_an_error_nobody_saw_is_raised_by_close(make_tensors: MakeTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "update_", lambda *_: 1 / 0)
    worker = open_worker()
    worker.submit(make_tensors(10), STEP)
    while worker.stats().pending:
        time.sleep(0.001)
    with pytest.raises(LaneError, match="division by zero"):
        worker.close()
    assert worker.close() == 1
