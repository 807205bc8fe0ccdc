"""`storm train` in a process that says what it is doing, so that it can be killed while it does it.

Run as a program it is a server: it imports everything once, then forks a process for each run, which is killed as any
other would be, and saves the ten seconds that imports take. A request is a line of JSON; the answers are the number of
the process, and its wait status when it has ended.

The processes write a letter for the thread (m for the one that trains, w for any other) and a phase to a pipe, before
they begin with it. Writing, renaming and removing are drawn out a little: on a small model each takes less time than it
takes to be killed. A phase may also be named at whose beginning the thread stops, and waits to be killed or for a file
beside the pipe that lets it go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HELD_S = 0.02


def announce_phases(pipe: str, stop_at: tuple[str, int] | None) -> None:
    """Make the parts of a run tell ``pipe`` when they begin. ``stop_at``: a phase, and which time of it."""
    import torch

    from stormtorch.checkpoint.files import disk
    from stormtorch.session.api import Session
    from stormtorch.streams.units import file_layout, sizes
    from stormtorch.training.run import loop, open_model, text_data
    from stormtorch.training.text import rows

    sizes._LEAST_CHUNK = file_layout.GRAIN  # the states of a small model take less than what else is passed through
    seen: Counter[str] = Counter()
    fd = os.open(pipe, os.O_WRONLY)

    def say(phase: str) -> None:
        thread = "m" if threading.current_thread() is threading.main_thread() else "w"
        os.write(fd, f"{thread} {phase}\n".encode())
        seen[phase] += 1
        end = time.monotonic() + 500
        while (phase, seen[phase]) == stop_at and time.monotonic() < end and not Path(f"{pipe}.go").exists():
            time.sleep(0.005)

    def before(owner: Any, name: str, phase: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any, **settings: Any) -> Any:
            say(phase)
            return original(*args, **settings)

        setattr(owner, name, wrapped)

    before(text_data, "prepare", "prepare")
    before(rows.RowWriter, "close", "rows")
    before(open_model, "build", "build")
    before(open_model, "load_weights", "weights")
    before(Session, "load", "load")
    before(loop, "forward_backward", "forward")
    before(torch.Tensor, "backward", "backward")
    before(Session, "clip_grad_norm_", "step")
    before(loop.Loop, "_after_step", "between")
    before(loop, "evaluate", "evaluate")
    before(Session, "save", "save")
    disk.CALLS = _drawn_out(disk.CALLS, say)


def _drawn_out(calls: Any, say: Callable[[str], None]) -> Any:
    """The calls of a checkpoint to the file system, announced and slowed down."""
    writes = itertools.count(1)

    def write(handle: int, view: memoryview, offset: int) -> int:
        say("write")
        half = next(writes) % 2 == 1  # the rest in another call
        time.sleep(_HELD_S / 20)
        written: int = calls.pwrite(handle, view[: -(-len(view) // 2)] if half else view, offset)
        return written

    def sync(handle: int) -> None:
        say("sync")
        calls.sync(handle)

    def rename(one: str, other: str) -> None:
        say("rename")
        time.sleep(_HELD_S)
        calls.rename(one, other)
        say("renamed")
        time.sleep(_HELD_S)

    def remove(path: str) -> None:
        say("remove")
        for file in sorted(Path(path).rglob("*")):
            if file.is_file():
                time.sleep(_HELD_S / 10)
                file.unlink()
        shutil.rmtree(path)
        say("removed")

    def read(handle: int, view: memoryview, offset: int) -> int:
        say("read")
        got: int = calls.pread(handle, view, offset)
        return got

    return dataclasses.replace(calls, pwrite=write, sync=sync, rename=rename, remove=remove, pread=read)


def _answer(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _serve() -> None:
    import torch
    import transformers.models.llama.modeling_llama

    import stormtorch.training.run.train
    from stormtorch.cli.main import main

    if "STORM_KILLS" in os.environ:  # the many also kill runs with adapters
        with contextlib.suppress(ImportError):
            importlib.import_module("peft")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
    del torch, transformers, stormtorch  # they are there for the processes to come
    _answer("ready")
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(log, 1)
                os.dup2(log, 2)
                announce_phases(asked["phases"], tuple(asked["stop_at"] or ()) or None)
                status = main(asked["arguments"])
                sys.stdout.flush()
            finally:
                os._exit(status)
        _answer(pid)
        _, ended = os.waitpid(pid, 0)
        _answer(os.waitstatus_to_exitcode(ended))


if __name__ == "__main__":
    _serve()
