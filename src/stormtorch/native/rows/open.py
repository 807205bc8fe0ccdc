"""Opens threads that read and write if the library was built; else the calling thread does."""

from __future__ import annotations

from ...core.notices import say_once
from ..library import describe, library
from ..moves import Move, read_at, write_at
from .c_rows import NativeRows
from .jobs import RowsPool


def open_rows(threads: int, *, stage_bytes: int = 0, read: Move = read_at, write: Move = write_at) -> RowsPool:
    """Start the threads.

    ``stage_bytes``: memory of each native thread through which it reads files, a multiple of 4096, allocated here.
    """
    native = library()
    if native is not None:
        return NativeRows(native, threads, stage_bytes, read=read, write=write)
    say_once(describe())
    return RowsPool(threads, read=read, write=write)
