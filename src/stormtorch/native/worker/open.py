"""Opens the optimizer's worker: native threads if the library was built, else a Python thread."""

from __future__ import annotations

from ...core.errors import SettingError
from ...core.notices import say_once
from ..cores import worker_share
from ..library import describe, library
from .c_worker import CPool
from .jobs import Worker
from .python_worker import PythonThread


def open_worker(threads: int | None = None) -> Worker:
    """Start a worker; close it, or use it in a ``with`` statement. Its threads run on all cores of this process, less
    one or two for the thread that launches work (see cores.py). ``threads``: by default one per core."""
    share, cores = worker_share()
    if threads is not None and threads < 1:
        raise SettingError(f"threads={threads!r} is not valid. Accepted: a whole number of at least 1, or None.")
    native = library()
    if native is None:
        say_once(describe())
        return Worker(PythonThread(threads=threads or share))
    return Worker(CPool(native, threads=threads or share, cores=cores))
