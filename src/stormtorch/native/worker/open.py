"""Opens the optimizer's worker: native threads if the library was built, else a Python thread."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...core.errors import SettingError
from ...core.notices import say_once
from ..cores import worker_share
from ..library import describe, library
from .c_worker import PoolWorker
from .jobs import Worker
from .python_worker import ThreadWorker


def open_worker(threads: int | None = None, cores: Sequence[int] | None = None) -> Worker:
    """Start a worker; close it, or use it in a ``with`` statement.

    ``cores``: CPU ids that its threads may run on; by default all that this process may use, less one or two for the
    thread that launches work (see cores.py). ``threads``: by default one per core.
    """
    share, allowed = worker_share()
    if cores is not None:
        allowed = sorted(set(cores))
        share = len(allowed)
        if not allowed or not set(allowed) <= os.sched_getaffinity(0):
            raise SettingError(
                f"cores={list(cores)!r} are not valid. Accepted: one or more of {sorted(os.sched_getaffinity(0))}."
            )
    if threads is not None and threads < 1:
        raise SettingError(f"threads={threads!r} is not valid. Accepted: a whole number of at least 1, or None.")
    native = library()
    if native is None:
        say_once(describe())
        return ThreadWorker(threads=threads or share, cores=allowed)
    return PoolWorker(native, threads=threads or share, cores=allowed)
