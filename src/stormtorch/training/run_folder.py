"""The folder of a run: ``checkpoints/step-00000100``, ``metrics.jsonl``, ``data/``. One process at a time writes it."""

from __future__ import annotations

import fcntl
import re
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from ..checkpoint.folder import all_complete, not_created, remove_all, sweep
from ..core.errors import SettingError, StorageError
from ..memory.file_calls import storage_error
from .settings import METRICS

_CHECKPOINT = re.compile(r"step-\d{8,}")


class RunFolder:
    """Made if it is not there, and locked while entered; what killed processes have left is removed then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / METRICS
        self.data = path / "data"
        self.tensorboard = path / "tensorboard"
        self._lock: TextIO | None = None

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    @staticmethod
    def is_own(path: Path) -> bool:
        """Whether a checkpoint has a name that runs give. A copy under any other is the user's, and stays."""
        return _CHECKPOINT.fullmatch(path.name) is not None

    def prune(self, keep: int) -> None:
        """Remove all but the ``keep`` newest of the run's own."""
        remove_all([path for path in all_complete(self.checkpoints) if self.is_own(path)][:-keep])

    def __enter__(self) -> Self:
        try:
            self._make()
            self._lock = (self.path / ".lock").open("w", encoding="utf-8")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._unlock()
            raise SettingError(
                f"Another storm train is running in {self.path}. Wait for it, or use --output."
            ) from None
        except StorageError:
            raise
        except OSError as error:
            self._unlock()
            raise storage_error(f"write to --output {self.path}", error) from error
        try:
            sweep(self.checkpoints)
            for rest in self.path.glob(f".{METRICS}.writing-*"):
                rest.unlink(missing_ok=True)
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unlock()

    def _make(self) -> None:
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:
            raise not_created(self.path, error) from error

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
