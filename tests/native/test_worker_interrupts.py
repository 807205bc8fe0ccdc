"""What may come between any two lines: Ctrl-C, the garbage collector, finalizers that call the worker themselves."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from stormtorch.core.errors import LaneError
from stormtorch.native import fallback
from stormtorch.native.library import Library
from stormtorch.native.update import AdamStep, AdamTensors
from stormtorch.native.worker.c_worker import CPool
from stormtorch.native.worker.jobs import Worker
from stormtorch.native.worker.open import open_worker
from stormtorch.native.worker.python_worker import PythonThread

from ..drained import drained
from ..forkserver import run

MakeTensors = Callable[..., AdamTensors]
OpenAny = Callable[..., Worker]
STEP = AdamStep(lr=1e-2, step=3)


class Around:
    """The C library, with something before or after each submission."""

    def __init__(self, c: Any, before: Callable[[], Any] = int, after: Callable[[], Any] = int) -> None:
        self.c, self.before, self.after = c, before, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.c, name)

    def storm_pool_submit(self, *arguments: Any) -> Any:
        refused = self.before()
        status = refused or self.c.storm_pool_submit(*arguments)
        self.after()
        return status


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def pool_worker(native: Library) -> Worker:
    return Worker(CPool(native, threads=1, cores=[]))


@pytest.fixture
def thread_worker() -> Worker:
    return Worker(PythonThread(threads=1))


def test_ctrl_c_after_c_took_the_job(pool_worker: Any, native: Library, make_tensors: MakeTensors, words: Any) -> None:
    tensors = make_tensors(1000)
    alive = weakref.ref(tensors)
    pool_worker._engine.c = Around(native.c, after=interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool_worker.submit(tensors, STEP, ready=words.at(0), done=words.at(1))
    pool_worker._engine.c = native.c
    del tensors
    gc.collect()
    assert alive() is not None, "C threads will still write there"
    pool_worker.submit(make_tensors(10), STEP)
    words[0] = 1
    assert drained(pool_worker, 20)
    pool_worker.stats()  # the last job may have ended after the first look at those that are over
    gc.collect()
    assert alive() is None
    assert pool_worker.stats().finished == 2
    pool_worker.close()


def test_ctrl_c_before_c_took_the_job(pool_worker: Any, native: Library, make_tensors: MakeTensors, words: Any) -> None:
    tensors = make_tensors(1000)
    alive = weakref.ref(tensors)
    pool_worker._engine.c = Around(native.c, before=interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool_worker.submit(tensors, STEP)
    pool_worker._engine.c = native.c
    del tensors
    pool_worker.submit(make_tensors(10), STEP, done=words.at(0))
    assert drained(pool_worker, 20)
    assert words[0] == 1
    pool_worker.close()
    gc.collect()
    assert alive() is None


def test_a_refused_job_is_not_held(pool_worker: Any, native: Library, make_tensors: MakeTensors) -> None:
    pool_worker._engine.c = Around(native.c, before=lambda: -12)
    with pytest.raises(LaneError, match="did not take the job: Cannot allocate memory"):
        pool_worker.submit(make_tensors(10), STEP)
    assert not pool_worker._engine.held
    pool_worker.close()


def test_a_call_in_the_middle_of_a_call(
    pool_worker: Any, native: Library, make_tensors: MakeTensors, words: Any
) -> None:
    """As the garbage collector or a signal handler would make one: first another submission, then the end."""
    pool = pool_worker._engine

    def submit_another() -> None:
        pool.c = native.c
        pool_worker.submit(make_tensors(10), STEP, done=words.at(1))

    pool.c = Around(native.c, before=submit_another)
    pool_worker.submit(make_tensors(10), STEP, done=words.at(0))
    assert drained(pool_worker, 20)
    assert (words[0], words[1]) == (1, 1)
    pool.c = Around(native.c, before=pool_worker.close)
    with pytest.raises(LaneError, match="did not take the job"):
        pool_worker.submit(make_tensors(10), STEP)
    assert not pool.held


def test_tensors_go_when_no_lock_is_held(open_any: OpenAny, make_tensors: MakeTensors, words: Any) -> None:
    """What hangs on them may need the worker, on this thread or through another one."""
    worker = open_any()
    answered: list[bool] = []

    def ask_from_another_thread() -> None:
        thread = threading.Thread(target=worker.stats, daemon=True)
        thread.start()
        thread.join(300)
        answered.append(not thread.is_alive())

    def submit_one(**flags: Any) -> None:
        tensors = make_tensors(10)
        weakref.finalize(tensors, ask_from_another_thread)
        worker.submit(tensors, STEP, **flags)

    def wait_for(count: int) -> None:
        end = time.monotonic() + 300
        while len(answered) < count and time.monotonic() < end:
            time.sleep(0.001)

    submit_one()
    drained(worker, 20)  # lets the first go
    wait_for(1)
    calls: list[Callable[[], object]] = [worker.stats, lambda: worker.submit(make_tensors(10), STEP)]
    for turn, call in enumerate(calls, 1):
        submit_one(done=words.at(0, turn))
        while words[0] < turn:
            time.sleep(0.001)
        call()
        wait_for(1 + turn)
    submit_one(ready=words.at(1), abort=words.at(2))
    words[2] = 1
    drained(worker, 20)
    wait_for(4)
    submit_one(ready=words.at(1))
    worker.close()
    wait_for(5)
    assert answered == [True] * 5


def test_ctrl_c_in_the_fallback_leaves_no_wrong_count(thread_worker: Any, make_tensors: MakeTensors) -> None:
    class Interrupted(dict[int, Any]):
        def __setitem__(self, ticket: int, job: Any) -> None:
            super().__setitem__(ticket, job)
            interrupt()

    queue = thread_worker._engine
    with queue.lock:
        queue.jobs = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        thread_worker.submit(make_tensors(10), STEP)
    end = time.monotonic() + 300
    while thread_worker.stats().finished == 0 and time.monotonic() < end:
        time.sleep(0.001)  # not another call, which could wake the thread
    with queue.lock:
        queue.jobs = dict(queue.jobs)
    thread_worker.submit(make_tensors(10), STEP)
    assert drained(thread_worker, 20)
    stats = thread_worker.stats()
    assert (stats.finished, stats.pending) == (2, 0)
    thread_worker.close()


STORM = """
import random, signal, sys, threading, time
import torch
from stormtorch.native import library
if {hidden}:
    library._load = lambda: "hidden by a test"
from stormtorch.native.update import AdamStep, AdamTensors
from stormtorch.native.worker.open import open_worker
worker, main = open_worker(threads=1), threading.main_thread().ident
tensors = AdamTensors(**{{name: torch.zeros(8) for name in ("weight", "exp_avg", "exp_avg_sq", "grad")}})
step, over, armed = AdamStep(lr=0.1, step=1), False, False
def interrupt(*_):
    global armed
    if armed:  # only inside the try below, and once each time: the script itself must not be hit
        armed = False
        raise KeyboardInterrupt
def nag():
    while not over:
        time.sleep(random.random() * 0.002)
        signal.pthread_kill(main, signal.SIGINT)
signal.signal(signal.SIGINT, interrupt)
nagging = threading.Thread(target=nag)
hits, end = 0, time.monotonic() + 2
nagging.start()
while time.monotonic() < end or (hits <= 100 and time.monotonic() < end + 200):
    try:
        armed = True
        while worker.stats().pending < 20:
            worker.submit(tensors, step)
        while worker.stats().pending:
            pass
        armed = False
    except KeyboardInterrupt:
        hits += 1
over = True
nagging.join()
while worker.stats().pending:
    time.sleep(0.001)
assert worker.close() == 0
print("survived" if hits > 100 else f"only {{hits}} came through")
"""


@pytest.mark.parametrize("hidden", [False, pytest.param(True, marks=pytest.mark.wide)], ids=["native", "fallback"])
def test_a_storm_of_ctrl_c(hidden: bool) -> None:
    start = subprocess.run if hidden else run  # hidden before anything has loaded it
    done = start(
        [sys.executable, "-c", STORM.format(hidden=hidden)], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.stdout == "survived\n", done.stderr


@pytest.mark.usefixtures("no_library")
def test_a_worker_collected_on_its_own_thread(
    make_tensors: MakeTensors, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector runs wherever memory is allocated. What it raises there, pytest turns into a failure."""
    real, begun, inside = fallback.update_, threading.Event(), threading.Event()

    def collecting(*arguments: Any) -> None:
        real(*arguments)
        begun.set()
        inside.wait(20)
        gc.collect()

    monkeypatch.setattr(fallback, "update_", collecting)
    worker: Any = open_worker()
    queue = worker._engine
    worker.submit(make_tensors(10), STEP, done=words.at(0))
    worker.submit(make_tensors(10), STEP, ready=words.at(9), done=words.at(1))
    worker.itself = worker  # a cycle: only the collector can end it
    assert begun.wait(300)
    gc.disable()
    try:
        del worker
        inside.set()
        queue.thread.join(300)
    finally:
        gc.enable()
    assert not queue.thread.is_alive()
    assert (queue.finished, queue.abandoned, words[0], words[1]) == (1, 1, 1, 1)
