"""Reads files on a Python thread, one after another."""

from __future__ import annotations

import queue
import threading
import time

import torch

from ...core.endings import Closing
from ...core.errors import StorageError, StormError
from ...native.worker.jobs import FlagValue
from .buffers import bytes_of
from .calls import SystemCalls, storage_error

_POLL_S = 50e-6


class ReadingThread(Closing):
    """A reader of files."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[object, ...] | None] = queue.SimpleQueue()
        self._failure: StormError | None = None
        self._stopping, self._tickets = False, 0
        self._thread = threading.Thread(target=self._run, name="storm-read", daemon=True)
        self._thread.start()

    def read(
        self,
        number: int,
        offset: int,
        target: torch.Tensor,
        *,
        priority: int,  # noqa: ARG002
        ready: FlagValue | None,
        also: FlagValue | None,
        done: FlagValue | None,
        abort: FlagValue | None,
    ) -> int:
        self._tickets += 1
        self._queue.put((number, offset, target, [flag for flag in (ready, also) if flag], done, abort))
        return self._tickets

    def failure(self) -> StormError | None:
        return self._failure

    def close(self) -> None:
        self._stopping = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._one(*item)  # type: ignore[arg-type]

    def _one(
        self,
        number: int,
        offset: int,
        target: torch.Tensor,
        flags: list[FlagValue],
        done: FlagValue | None,
        abort: FlagValue | None,
    ) -> None:
        is_dropped = False
        while not is_dropped and not all(flag.reached() for flag in flags):
            is_dropped = self._stopping or (abort is not None and abort.reached())
            time.sleep(_POLL_S)
        if not is_dropped and not (abort is not None and abort.reached()):
            self._fill(number, offset, target, abort)
        if done is not None:
            done.write()

    def _fill(self, number: int, offset: int, target: torch.Tensor, abort: FlagValue | None) -> None:
        view, got = bytes_of(target, writable=True), 0
        what = f"read bytes {offset} to {offset + len(view)} of a file"
        try:
            while got < len(view):
                more = SystemCalls().pread(number, view[got:], offset + got)
                if not more:
                    raise StorageError(f"Cannot {what}: it is truncated.")
                got += more
        except OSError as error:
            self._failure = error if isinstance(error, StorageError) else storage_error(what, error)
            target.fill_(255)
            if abort is not None:
                abort.write()
