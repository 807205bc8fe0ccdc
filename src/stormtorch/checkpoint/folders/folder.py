"""Folders of checkpoints: find the complete and the newest ones, and remove them.

A save writes to `.<name>.writing-<pid>-<random>`, beside the final place. It writes the manifest after all other files
are on the disk, renames the folder, and fsyncs its parent. So a folder with a checkpoint's name is complete, whenever
the machine stops. Removal renames the folder to `.<name>.removing-...` before it removes files. If the file system
cannot swap two names in one step, the old checkpoint is `.<name>.replaced-...` for a moment. `sweep` removes such
folders of dead processes, and restores the name of a replaced checkpoint if the new one did not get it. A process locks
the folder that it writes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from pathlib import Path

import psutil

from ...core.errors import CheckpointError, SettingError, StorageError
from ...memory.disk.calls import storage_error, storage_errors
from ..files import disk
from .manifest import check_complete

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<why>writing|removing|replaced)-(?P<pid>\d+)-[0-9a-f]+")
OURS: set[str] = set()  # unfinished folders of this process
_LOCK_GRACE_S = 60.0  # the process that made a younger folder may be about to lock it


def not_created(folder: Path, error: OSError) -> StorageError:
    """The error for a folder that cannot be made. After its parents were made, ENOENT means a place without folders."""
    if error.errno != errno.ENOENT:
        return storage_error(f"create {folder}", error)
    found = StorageError(f"Cannot create {folder}: no folders can be made there [ENOENT]. Name a directory on a disk.")
    found.errno = error.errno
    return found


def complete(path: Path | str) -> bool:
    """Whether ``path`` is a checkpoint whose files all exist with their sizes. Loading verifies the checksums."""
    try:
        check_complete(Path(path))
    except (CheckpointError, StorageError):
        return False
    return True


def all_complete(parent: Path | str) -> list[Path]:
    """The complete checkpoints in ``parent``, oldest first: by step, then by time of writing. Skips links to them."""
    found = []
    entries = _entries(Path(parent))
    here = {os.path.realpath(path) for path in entries if not path.is_symlink()}
    for path in entries:
        if path.is_symlink() and os.path.realpath(path) in here:
            continue
        if not path.name.startswith(".") and path.is_dir():
            with contextlib.suppress(CheckpointError, StorageError):
                manifest = check_complete(path)
                found.append(((manifest.step, manifest.created, path.name), path))
    return [path for _, path in sorted(found)]


def newest(parent: Path | str) -> Path | None:
    """The newest complete checkpoint in ``parent``, if there is one."""
    found = all_complete(parent)
    return found[-1] if found else None


def prune(parent: Path | str, keep: int) -> list[Path]:
    """Remove all but the ``keep`` newest complete checkpoints; returns those removed. Touches nothing else."""
    if keep < 1:
        raise SettingError(f"keep={keep} is not valid. Accepted: whole numbers of at least 1.")
    return remove_all(all_complete(parent)[:-keep])


def remove_all(old: list[Path]) -> list[Path]:
    """Remove these checkpoints, if they still exist; returns them."""
    for path in old:
        try:
            remove(path)
        except StorageError as error:
            if error.errno != errno.ENOENT:  # another process prunes too
                raise
    return old


def remove(path: Path) -> None:
    """Remove a checkpoint; half of one never has its name. Removes a link, not its target."""
    hidden = beside(path, "removing")
    OURS.add(str(hidden))
    try:
        with storage_errors(f"remove {path}"):
            disk.CALLS.rename(str(path), str(hidden))
            disk.sync_folder(path.parent)
            _delete(hidden)
    finally:
        OURS.discard(str(hidden))


def sweep(parent: Path | str) -> list[Path]:
    """Remove unfinished folders of dead processes in ``parent``; returns their paths."""
    removed = []
    for path in _entries(Path(parent)):
        match = _LEFTOVER.fullmatch(path.name)
        if match is not None and path.is_dir() and not _is_in_use(int(match["pid"]), path):
            with contextlib.suppress(OSError):  # another process sweeps too, or the folder is another user's
                before = path.parent / match["name"]
                if match["why"] == "replaced" and not before.exists() and complete(path):
                    disk.CALLS.rename(str(path), str(before))  # killed between the two renames
                else:
                    _delete(path)
                    removed.append(path)
    return removed


def _delete(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        disk.CALLS.remove(str(path))


def _is_in_use(pid: int, path: Path) -> bool:
    """Whether a process still writes or removes an unfinished folder.

    The lock is the best evidence: it ends with its process, while process ids are reused and repeat in each container.
    Without a lock, because the file system has none or the process has not taken it yet, the id decides."""
    if pid == os.getpid() and str(path) in OURS:
        return True
    try:
        locked = _is_locked(path)
        if locked:
            return True
        if pid == os.getpid():
            return False
        began, changed = psutil.Process(pid).create_time(), path.stat().st_mtime
        would_be_locked = locked is False and ".writing-" in path.name and time.time() - changed > _LOCK_GRACE_S
        return not would_be_locked and began <= changed + 1  # else another process has the id now
    except (psutil.NoSuchProcess, FileNotFoundError, OverflowError):  # OverflowError: larger than any process id
        return False
    except psutil.AccessDenied:
        return True


def lock(path: Path) -> int | None:
    """Lock a folder; returns the descriptor, whose closing releases the lock, or None if the folder has no lock."""
    with contextlib.suppress(OSError):
        return _locked(path, fcntl.LOCK_SH)
    return None


def _is_locked(path: Path) -> bool | None:
    """Whether a process holds a lock on a folder; None if unknown."""
    try:
        os.close(_locked(path, fcntl.LOCK_EX))
    except BlockingIOError:
        return True
    except FileNotFoundError:
        raise
    except OSError:
        return None
    return False


def _locked(path: Path, how: int) -> int:
    """Open a folder with a lock. Raises OSError if that is not possible at once."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd


def beside(path: Path, why: str) -> Path:
    """A temporary name for a checkpoint in the same parent, with the reason and this process's id."""
    match = _LEFTOVER.fullmatch(path.name)
    stem = path.name if match is None else match["name"]
    return path.parent / f".{stem}.{why}-{os.getpid()}-{os.urandom(4).hex()}"


def _entries(parent: Path) -> list[Path]:
    try:
        return sorted(parent.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(f"list {parent}", error) from error
