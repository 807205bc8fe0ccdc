"""Opens threads that read if the library was built; else the calling thread reads."""

from __future__ import annotations

from ...core.notices import say_once
from ..library import describe, library
from .c_rows import NativeRows
from .jobs import RowsPool
from .python_rows import CallerRows


def open_rows(threads: int, *, stage_bytes: int = 0) -> RowsPool:
    """Start the threads.

    ``stage_bytes``: memory of each native thread through which it reads files, a multiple of 4096, allocated here.
    """
    native = library()
    if native is not None:
        return NativeRows(native, threads, stage_bytes)
    say_once(describe())
    return CallerRows(threads)
