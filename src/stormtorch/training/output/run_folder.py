"""The folder of a run: ``checkpoints/step-00000100``, ``metrics.jsonl``, ``data/``. One process at a time writes it.

The folder may be untrusted. It may itself be a link, because the user named it; links inside it, at names that a run
writes or removes, are refused.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from ...checkpoint.folders.folder import all_complete, not_created, remove_all, sweep
from ...core.endings import Closing
from ...core.errors import SettingError
from ...memory.disk.calls import storage_errors
from ...memory.disk.contained import check_no_link, open_to_write
from ..settings.train_settings import METRICS

_CHECKPOINT = re.compile(r"step-\d{8,}")
_LOCK = ".lock"


class RunFolder(Closing):
    """Makes the folder, locks it until ``close``, and removes leftovers of killed processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / METRICS
        self.data = path / "data"
        self.tensorboard = path / "tensorboard"
        self.damaged = path / "damaged"
        with storage_errors(f"write to --output {path}"):
            try:
                path.mkdir(parents=True, exist_ok=True)
                check_no_link(self.checkpoints)
                self.checkpoints.mkdir(exist_ok=True)
            except FileNotFoundError as error:
                raise not_created(path, error) from error
            self._lock = os.fdopen(open_to_write(path / _LOCK, append=True), "rb")
            try:
                self._take()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        self._lock.close()

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    @staticmethod
    def is_own(path: Path) -> bool:
        """Whether a checkpoint has a name that runs give. Other names are the user's, and are never removed."""
        return _CHECKPOINT.fullmatch(path.name) is not None

    def prune(self, keep: int) -> None:
        """Remove all but the ``keep`` newest of the run's own checkpoints."""
        remove_all([path for path in all_complete(self.checkpoints) if self.is_own(path)][:-keep])

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingError(
                f"Another storm train is running in {self.path}. Wait for it, or use another --output."
            ) from None
        own = [path for path in self.checkpoints.iterdir() if self.is_own(path)]
        for path in (self.metrics, self.data, self.damaged, self.tensorboard, *own):
            check_no_link(path)
        sweep(self.checkpoints)
        for rest in self.path.glob(f".{METRICS}.writing-*"):
            rest.unlink(missing_ok=True)
