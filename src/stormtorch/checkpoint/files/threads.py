"""Runs tasks on a few threads: reading, writing and checksums all release the GIL."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from .disk import Stopped

Task = Callable[[threading.Event], None]
_MAX_THREADS = 4  # one thread computes the checksum of 2 GB/s, more than most disks write


def run_all(tasks: Sequence[Task], stop: threading.Event | None = None) -> None:
    """Run the tasks, started in order. Blocks; raises the first error after all threads have ended.

    Setting ``stop`` ends them early, as an error or Ctrl-C does: tasks check it between chunks."""
    stop = threading.Event() if stop is None else stop
    waiting, lock = iter(tasks), threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        while not stop.is_set():
            with lock:
                task = next(waiting, None)
            if task is None:
                return
            try:
                task(stop)
            except Stopped:
                return
            except BaseException as error:
                errors.append(error)
                stop.set()

    count = min(_MAX_THREADS, os.cpu_count() or 1, len(tasks))
    threads = [threading.Thread(target=work, name="storm-checkpoint") for _ in range(count)]
    try:
        if not _start(threads):
            work()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    except BaseException:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise
    if errors:
        raise errors[0]
    if stop.is_set():
        raise Stopped


def _start(threads: Sequence[threading.Thread]) -> bool:
    """Start as many threads as possible; False if none started.

    A save may outlive the main thread, and from Python 3.12 on no thread starts after that."""
    for thread in threads:
        try:
            thread.start()
        except RuntimeError:
            return thread is not threads[0]
    return bool(threads)
