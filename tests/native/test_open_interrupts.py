"""Ctrl-C while threads are being started: those that have begun end, although no object is left to close them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from stormtorch.native.library import Library
from stormtorch.native.rows.c_rows import NativeRows
from stormtorch.native.worker.c_worker import CPool
from stormtorch.native.worker.jobs import Worker
from stormtorch.native.worker.python_worker import PythonThread

from ..keyboard import Keyboard


def opening(kind: str, native: Library) -> tuple[Callable[[], object], str]:
    """What starts threads, and the file of its code."""
    return {
        "native rows": (lambda: NativeRows(native, 2), "native/rows/c_rows.py"),
        "native worker": (lambda: Worker(CPool(native, threads=2, cores=[0])), "native/worker/c_worker.py"),
        "worker": (lambda: Worker(PythonThread(threads=1)), "native/worker/python_worker.py"),
    }[kind]


def _append(opened: list[object], start: Callable[[], object]) -> None:
    opened.append(start())


def threads_now() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


@pytest.fixture
def _quick_collection() -> Iterator[None]:
    """What is there already is not looked at again in every one of many collections."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_quick_collection")
@pytest.mark.parametrize("kind", ["native rows", "native worker", "worker"])
def test_ctrl_c_at_every_line_of_starting_threads(kind: str, native: Library) -> None:
    start, file = opening(kind, native)
    before = threads_now()
    for at in range(1, 100):
        keyboard = Keyboard(at, (file, "native/worker/jobs.py"))
        opened: list[object] = []  # so that nothing ends within reach of the keyboard
        ended = keyboard.during(partial(_append, opened, start))
        opened.clear()
        gc.collect()
        until = time.monotonic() + 300
        while threads_now() - before and time.monotonic() < until:
            time.sleep(0.001)
        assert not threads_now() - before, keyboard.where
        if ended and not keyboard.was_pressed:
            break
    assert 5 < at < 99
