"""Saving during a run: in the background, the oldest removed when the newest is there. A full disk does not end it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..api import Session
from ..checkpoint.folder import prune
from ..core.errors import StorageError
from ..memory.file_calls import storage_error
from .run_folder import RunFolder


class Checkpoints:
    """``save`` starts or makes a checkpoint; ``poll``, after every step, tidies up when one was completed.

    ``on_saved`` is told of each that is complete: its step, and the seconds since it was asked for.
    """

    def __init__(
        self,
        session: Session,
        folder: RunFolder,
        *,
        keep: int,
        write_files: Callable[[Path, int], None],
        warn: Callable[[str], None],
        on_saved: Callable[[int, float], None],
        last: Path | None = None,
    ) -> None:
        self._session, self._folder, self._keep = session, folder, keep
        self._write_files, self._warn = write_files, warn
        self._on_saved = on_saved
        self._coming: Path | None = None
        self._step, self._began_s = 0, 0.0
        self.last = last  # the newest that is known to be complete

    def save(self, step: int, also: dict[str, Any], *, wait: bool) -> bool:
        """Whether it went well so far. A disk that is full is said; the run goes on, and the last one is intact."""
        path = self._folder.checkpoint(step)
        self.finish()
        began_s = time.perf_counter()
        try:
            self._session.save(path, also=also, files=lambda folder: self._write_files(folder, step), wait=wait)
        except OSError as error:  # StorageError, or what a tokenizer's own writing raised
            self._say_failed(path, error if isinstance(error, StorageError) else storage_error(f"write {path}", error))
            return False
        self._coming, self._step, self._began_s = path, step, began_s
        if wait:
            self.poll()
        return True

    def poll(self) -> None:
        """Note what was completed in the background, and remove what is too old. Costs one look at a file name."""
        if self._coming is None or not self._coming.exists():
            return
        self.last, self._coming = self._coming, None
        self._on_saved(self._step, time.perf_counter() - self._began_s)
        try:
            prune(self._folder.checkpoints, self._keep)
        except StorageError as error:
            self._warn(f"An old checkpoint could not be removed: {error}")

    def finish(self) -> bool:
        """Wait for a save in the background; whether there is none that failed."""
        if self._coming is None:
            return True
        try:
            self._session.synchronize()
        except StorageError as error:
            self._say_failed(self._coming, error)
            self._coming = None
            return False
        self.poll()
        return True

    def _say_failed(self, path: Path, error: StorageError) -> None:
        good = f"the last good one is {self.last}" if self.last is not None else "there is none yet"
        self._warn(f"{path.name} was not saved: {error} Training goes on; {good}.")
