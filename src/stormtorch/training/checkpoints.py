"""Saving during a run: in the background, the oldest removed when the newest is there. A full disk does not end it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..api import Session
from ..checkpoint.folder import prune
from ..core.errors import StorageError
from .run_folder import RunFolder


class Checkpoints:
    """``save`` starts or makes a checkpoint; ``poll``, after every step, tidies up when one was completed."""

    def __init__(
        self,
        session: Session,
        folder: RunFolder,
        *,
        keep: int,
        write_files: Callable[[Path, int], None],
        warn: Callable[[str], None],
        last: Path | None = None,
    ) -> None:
        self._session, self._folder, self._keep = session, folder, keep
        self._write_files, self._warn = write_files, warn
        self._coming: Path | None = None
        self.last = last  # the newest that is known to be complete

    def save(self, step: int, also: dict[str, Any], *, wait: bool) -> bool:
        """Whether it went well so far. A disk that is full is said; the run goes on, and the last one is intact."""
        path = self._folder.checkpoint(step)
        self._finish_earlier()
        try:
            self._session.save(path, also=also, files=lambda folder: self._write_files(folder, step), wait=wait)
        except StorageError as error:
            self._say_failed(path, error)
            return False
        self._coming = path
        if wait:
            self.poll()
        return True

    def poll(self) -> None:
        """Note what was completed in the background, and remove what is too old. Costs one look at a file name."""
        if self._coming is None or not self._coming.exists():
            return
        self.last, self._coming = self._coming, None
        try:
            prune(self._folder.checkpoints, self._keep)
        except StorageError as error:
            self._warn(f"An old checkpoint could not be removed: {error}")

    def _finish_earlier(self) -> None:
        """An error of the last save in the background is that one's, not of the one that begins."""
        if self._coming is None:
            return
        try:
            self._session.synchronize()
        except StorageError as error:
            self._say_failed(self._coming, error)
            self._coming = None
        self.poll()

    def _say_failed(self, path: Path, error: StorageError) -> None:
        good = f"the last good one is {self.last}" if self.last is not None else "there is none yet"
        self._warn(f"{path.name} was not saved: {error} Training goes on; {good}.")
