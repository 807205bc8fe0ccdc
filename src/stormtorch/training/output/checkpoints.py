"""Saves checkpoints during a run, in the background, and removes old ones. A full disk does not end the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...checkpoint.folders.manifest import read_manifest
from ...core.errors import CheckpointError, StorageError
from ...memory.disk.calls import storage_errors
from ...session.api import Session
from ..reporting.usage import Spent
from .run_folder import RunFolder

WriteFiles = Callable[[Path, int, bool], None]
OnSaved = Callable[[int, Spent], None]


class Checkpoints:
    """``save`` starts or makes a checkpoint; ``poll``, after every step, prunes when one was completed.

    ``write_files`` adds files beside the weights; its arguments: the folder, the step, and whether the optimizer's
    states are saved. ``on_saved`` is called for each complete checkpoint with its step and cost.
    """

    def __init__(
        self,
        session: Session,
        folder: RunFolder,
        *,
        keep: int,
        optimizer: bool,
        write_files: WriteFiles,
        warn: Callable[[str], None],
        on_saved: OnSaved,
        last: Path | None = None,
    ) -> None:
        self._session, self._folder, self._keep, self._optimizer = session, folder, keep, optimizer
        self._write_files, self._warn, self._on_saved = write_files, warn, on_saved
        self._coming: Path | None = None
        self._step, self._began_s = 0, 0.0
        self.last = last  # the newest known to be complete
        self.weights_alone: Path | None = None  # saved at the end because a full checkpoint did not fit

    def save(self, step: int, also: dict[str, Any], *, wait: bool) -> bool:
        """Start a save; False if it failed. Warns of a full disk; the run goes on, and the last one is intact."""
        path = self._folder.checkpoint(step)
        self.finish()
        began_s = time.perf_counter()
        try:
            self._write(path, step, also, wait=wait, optimizer=self._optimizer)
        except StorageError as error:
            self._say_failed(path, error, goes_on=not wait)
            return False
        self._coming, self._step, self._began_s = path, step, began_s
        if wait:
            self.poll()
        return True

    def save_weights_alone(self, step: int, also: dict[str, Any]) -> None:
        """At the end of a run whose last save failed, save the weights without the optimizer, if they fit.

        Removes nothing: the last checkpoint with the optimizer's states remains."""
        path = self._folder.checkpoint(step)
        began_s = time.perf_counter()
        try:
            self._write(path, step, also, wait=True, optimizer=False)
        except StorageError as error:
            self._warn(f"The weights alone were not saved either: {error}")
            return
        self.weights_alone = path
        self._on_saved(step, _spent(path, began_s))

    def poll(self) -> None:
        """Note a completed background save, and prune. Costs one check of a file name."""
        if self._coming is None or not self._coming.exists():
            return
        self.last, self._coming = self._coming, None
        self._on_saved(self._step, _spent(self.last, self._began_s))
        try:
            self._folder.prune(self._keep)
        except StorageError as error:
            self._warn(f"An old checkpoint could not be removed: {error}")

    def finish(self) -> bool:
        """Wait for a save in the background; False if it failed."""
        if self._coming is None:
            return True
        try:
            self._session.synchronize()
        except StorageError as error:
            self._say_failed(self._coming, error, goes_on=True)
            self._coming = None
            return False
        self.poll()
        return True

    def _say_failed(self, path: Path, error: StorageError, *, goes_on: bool) -> None:
        good = f"The last good one is {self.last}." if self.last is not None else "There is no checkpoint yet."
        self._warn(f"{path.name} was not saved: {error} {'Training goes on. ' if goes_on else ''}{good}")

    def _write(self, path: Path, step: int, also: dict[str, Any], *, wait: bool, optimizer: bool) -> None:
        with storage_errors(f"write {path}"):  # the tokenizer's own writing raises OSError
            self._session.save(
                path,
                also=also,
                files=lambda folder: self._write_files(folder, step, optimizer),
                wait=wait,
                optimizer=optimizer,
            )


def _spent(path: Path, began_s: float) -> Spent:
    seconds = time.perf_counter() - began_s
    try:
        return Spent(seconds, read_manifest(path).total_bytes)
    except (CheckpointError, StorageError):  # removed in the meantime
        return Spent(seconds, 0)
