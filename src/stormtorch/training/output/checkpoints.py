"""Saves checkpoints during a run, in the background, and removes old ones. A full disk does not end the run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...checkpoint.folders.manifest import read_manifest
from ...core.errors import CheckpointError, StorageError
from ...memory.disk.calls import storage_errors
from ...session.api import Session
from ..reporting import Spent
from ..settings.train_settings import TrainSettings
from .metrics import Metrics
from .run_folder import RunFolder

WriteFiles = Callable[[Path, int, bool], None]


class Checkpoints:
    """``save`` starts or makes a checkpoint; ``poll``, after every step, prunes when one was completed.

    ``write_files`` adds files beside the weights; its arguments: the folder, the step, and whether the optimizer's
    states are saved. ``done``: the steps before the first. ``last``: the newest checkpoint known to be complete.
    """

    def __init__(
        self,
        session: Session,
        folder: RunFolder,
        settings: TrainSettings,
        metrics: Metrics,
        write_files: WriteFiles,
        warn: Callable[[str], None],
        *,
        done: int,
        last: Path | None,
    ) -> None:
        self._session, self._folder, self._settings, self._metrics = session, folder, settings, metrics
        self._write_files, self._warn = write_files, warn
        self._coming: Path | None = None
        self._began_s = 0.0
        self.step: int | None = done  # saved or being saved; None if that failed
        self.last = last
        self.weights_alone: Path | None = None  # saved at the end because a full checkpoint did not fit

    def save(self, step: int, also: dict[str, Any], *, wait: bool) -> None:
        """Start a save, or make it. If it fails, warn: the run goes on, and the last checkpoint is intact."""
        path = self._folder.checkpoint(step)
        self.finish()
        try:
            self._write(path, step, also, wait=wait, optimizer=self._settings.save_optimizer)
        except StorageError as error:
            self._failed(path, error, goes_on=not wait)
            return
        self._coming, self.step = path, step
        if wait:
            self.poll()

    def save_weights_alone(self, step: int, also: dict[str, Any]) -> None:
        """At the end of a run whose last save failed, save the weights without the optimizer, if they fit.

        Removes nothing: the last checkpoint with the optimizer's states remains."""
        path = self._folder.checkpoint(step)
        try:
            self._write(path, step, also, wait=True, optimizer=False)
        except StorageError as error:
            self._warn(f"The weights alone were not saved either: {error}")
            return
        self.weights_alone = path
        self._note(path, step)

    def poll(self) -> None:
        """Note a completed background save, and prune. Costs one check of a file name."""
        if self._coming is None or not self._coming.exists():
            return
        assert self.step is not None
        self.last, self._coming = self._coming, None
        self._note(self.last, self.step)
        try:
            self._folder.prune(self._settings.keep)
        except StorageError as error:
            self._warn(f"An old checkpoint could not be removed: {error}")

    def finish(self) -> None:
        """Wait for a save in the background."""
        if self._coming is None:
            return
        try:
            self._session.synchronize()
        except StorageError as error:
            self._failed(self._coming, error, goes_on=True)
        else:
            self.poll()

    def _failed(self, path: Path, error: StorageError, *, goes_on: bool) -> None:
        self._coming = self.step = None
        good = f"The last good one is {self.last}." if self.last is not None else "There is no checkpoint yet."
        self._warn(f"{path.name} was not saved: {error} {'Training goes on. ' if goes_on else ''}{good}")

    def _write(self, path: Path, step: int, also: dict[str, Any], *, wait: bool, optimizer: bool) -> None:
        self._began_s = time.perf_counter()
        with storage_errors(f"write {path}"):  # the tokenizer's own writing raises OSError
            self._session.save(
                path,
                also=also,
                files=lambda folder: self._write_files(folder, step, optimizer),
                wait=wait,
                optimizer=optimizer,
            )

    def _note(self, path: Path, step: int) -> None:
        """Write the cost of a complete checkpoint to the metrics."""
        seconds, size_bytes = time.perf_counter() - self._began_s, 0
        with contextlib.suppress(CheckpointError, StorageError):  # removed in the meantime
            size_bytes = read_manifest(path).total_bytes
        self._metrics.write_spent("save", step, Spent(seconds, size_bytes))
