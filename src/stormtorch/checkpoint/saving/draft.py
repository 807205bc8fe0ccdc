"""Writes a checkpoint in a folder beside its final place, and renames it after everything is on the disk."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
from collections.abc import Mapping
from pathlib import Path

from ...core.errors import SettingError, StorageError
from ...memory.disk.calls import storage_errors
from ..files import disk
from ..files.disk import Record
from ..folders.folder import OURS, beside, lock, not_created, remove
from ..folders.manifest import MANIFEST, STORM, Manifest

_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


def place_of(directory: Path | str | os.PathLike[str]) -> Path:
    """The absolute path of a checkpoint, which later changes of directory do not affect. Follows a link at its end."""
    path = Path(os.path.abspath(directory))  # noqa: PTH100  # links among the parents are kept
    return Path(os.path.realpath(path)) if os.path.islink(path) else path  # noqa: PTH114  # never raises


class Draft:
    """A checkpoint that is being written, in a folder beside its final place."""

    def __init__(self, directory: Path | str | os.PathLike[str]) -> None:
        self.directory = place_of(directory)
        self.path = beside(self.directory, "writing")
        self._done = True  # there is no folder yet
        self._fd: int | None = None  # holds the lock

    def make(self) -> None:
        """Make the folder and its parents. Raises SettingError if the final place holds something else."""
        try:
            if self.directory.exists() and not _may_be_replaced(self.directory):
                raise SettingError(
                    f"{self.directory} exists and is not a checkpoint. Use a free name, or that of a checkpoint."
                )
            self._done = False
            OURS.add(str(self.path))
            _make_parents(self.directory.parent)
            disk.CALLS.mkdir(str(self.path))
            self._fd = lock(self.path)
            disk.CALLS.mkdir(str(self.path / STORM))
        except BaseException as error:
            self.discard()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise not_created(self.directory, error) from error
            raise

    def publish(self, step: int, records: Mapping[str, Record], versions: dict[str, str]) -> None:
        """Write the manifest and rename the folder. ``records``: manifest entries of files already on the disk."""
        known = dict(records)
        folders = {self.path / STORM}
        for path in sorted(self.path.rglob("*")):
            if path.is_symlink() and not _leads_inside(path, self.path):
                continue  # loading would refuse it
            if path.is_dir():
                folders.add(path)
            elif path.is_file() and str(path.relative_to(self.path)) not in known:
                known[str(path.relative_to(self.path))] = disk.sync_file(path)
        created = datetime.datetime.now(datetime.UTC).isoformat()
        manifest = Manifest(step, created, known, versions)
        disk.write_file(self.path / STORM / MANIFEST, manifest.to_json().encode())
        for folder in sorted(folders):
            disk.sync_folder(folder)
        disk.sync_folder(self.path)
        with storage_errors(f"rename {self.path} to {self.directory}"):
            self._rename()
        disk.sync_folder(self.directory.parent)
        self._end()

    def _rename(self) -> None:
        """Rename to the final name. Swaps names with an existing checkpoint, in one step if the file system can."""
        if not self.directory.exists() or not any(self.directory.iterdir()):
            try:
                disk.CALLS.rename(str(self.path), str(self.directory))
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster
                    raise
        try:
            disk.CALLS.exchange(str(self.path), str(self.directory))
        except OSError as error:
            if error.errno not in _CANNOT_EXCHANGE:
                raise
            self._rename_in_two_steps()
        else:
            # The draft's name is the old checkpoint's now: keep that until the new one is durable.
            self._end()
            disk.sync_folder(self.directory.parent)
            with contextlib.suppress(StorageError):  # the next sweep tries again
                remove(self.path)

    def _rename_in_two_steps(self) -> None:
        """Replace an old checkpoint without swapping names: remove its files only after the new one has its name."""
        aside = beside(self.directory, "replaced")
        OURS.add(str(aside))
        try:
            disk.CALLS.rename(str(self.directory), str(aside))
            try:
                disk.CALLS.rename(str(self.path), str(self.directory))
            except BaseException:
                os.rename(aside, self.directory)  # noqa: PTH104  # restores the old one
                raise
            disk.sync_folder(self.directory.parent)
            with contextlib.suppress(OSError):  # the next sweep tries again
                disk.CALLS.remove(str(aside))
        finally:
            OURS.discard(str(aside))

    def discard(self) -> None:
        """Remove an unpublished draft. Never raises: users must see the first error."""
        if not self._done:
            with contextlib.suppress(OSError):
                disk.CALLS.remove(str(self.path))
        self._end()

    def _end(self) -> None:
        self._done = True
        OURS.discard(str(self.path))
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def _leads_inside(link: Path, folder: Path) -> bool:
    return Path(os.path.realpath(link)).is_relative_to(os.path.realpath(folder))


def _make_parents(parent: Path) -> None:
    """Make missing folders, and fsync their parents where possible."""
    missing = []
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        with contextlib.suppress(StorageError):  # a folder may be writable but not readable
            disk.sync_folder(path.parent)


def _may_be_replaced(directory: Path) -> bool:
    if not directory.is_dir():
        return False
    return (directory / STORM / MANIFEST).is_file() or not any(directory.iterdir())
