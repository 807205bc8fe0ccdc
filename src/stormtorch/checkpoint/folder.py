"""Folders of checkpoints: which are complete, which is the newest, how one comes and goes.

A checkpoint is written under another name, `.<name>.writing-<pid>-<random>`, beside its place. When every file is on
the disk, the manifest is written as the last one, the folder is renamed, and its parent is forced to the disk. So a
folder with a checkpoint's name is whole, whenever the machine stopped. It goes the same way: first its name, to
`.<name>.removing-...`, then its files. What dead processes have left under such names is removed by `sweep`.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..core.errors import CheckpointError, SettingError, StorageError
from ..memory.file_calls import storage_error
from . import disk
from .disk import Record

FORMAT = 1
STORM = "storm"  # the folder inside of a checkpoint with what only STORM reads
MANIFEST = "manifest.json"
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(writing|removing)-(?P<pid>\d+)-[0-9a-f]+")
_OURS: set[str] = set()  # unfinished folders of this process


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    created: str
    files: dict[str, Record]
    versions: dict[str, str]

    @property
    def total_bytes(self) -> int:
        return sum(record.size for record in self.files.values())

    def to_json(self) -> str:
        content = {
            "format": FORMAT,
            "step": self.step,
            "created": self.created,
            "total_bytes": self.total_bytes,
            "versions": self.versions,
            "files": {
                name: {"bytes": record.size, "crc32": f"{record.crc:08x}"}
                for name, record in sorted(self.files.items())
            },
        }
        return json.dumps(content, indent=1) + "\n"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError, with what the folder is instead, if there is none."""
    path = directory / STORM / MANIFEST
    if not path.is_file():
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is no folder. Name a checkpoint.")
        raise CheckpointError(
            f"{directory} is no checkpoint of STORM: it has no {STORM}/{MANIFEST}. A plain folder of weights is opened "
            "by stormtorch.checkpoint.load_weights, or as --model."
        )
    try:
        content = json.loads(disk.read_whole(path))
        if content["format"] > FORMAT:
            raise CheckpointError(
                f"{path} has format {content['format']}; this version reads up to {FORMAT}. Update it."
            )
        files = {str(name): Record(int(f["bytes"]), int(f["crc32"], 16)) for name, f in content["files"].items()}
        return Manifest(int(content["step"]), str(content["created"]), files, dict(content["versions"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}). Take another checkpoint.") from None


def check_complete(directory: Path) -> Manifest:
    """The manifest, if all the files that it names are there with their sizes; raises CheckpointError otherwise."""
    manifest = read_manifest(directory)
    for name, record in manifest.files.items():
        try:
            size = os.stat(directory / name).st_size  # noqa: PTH116  # not a folder's, and one call
        except FileNotFoundError:
            raise CheckpointError(f"{directory / name} is missing. Take another checkpoint.") from None
        except OSError as error:
            raise storage_error(f"look at {directory / name}", error) from error
        if size != record.size:
            raise CheckpointError(
                f"{directory / name} has {size} bytes where {record.size} were written. Take another checkpoint."
            )
    return manifest


def complete(path: Path | str) -> bool:
    """Whether ``path`` is a checkpoint with all its files in their sizes. Sums are checked by loading."""
    try:
        check_complete(Path(path))
    except (CheckpointError, StorageError):
        return False
    return True


def all_complete(parent: Path | str) -> list[Path]:
    """The complete checkpoints in ``parent``, oldest first: by step, then by the time of writing."""
    found = []
    for path in _entries(Path(parent)):
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
    """Remove all but the ``keep`` newest complete checkpoints; returns what was removed. Touches nothing else."""
    if keep < 1:
        raise SettingError(f"keep={keep} is not accepted. Accepted: whole numbers of at least 1.")
    old = all_complete(parent)[:-keep]
    for path in old:
        remove(path)
    return old


def remove(path: Path) -> None:
    """Remove a checkpoint: at no moment is there half of one under its name."""
    hidden = _beside(path, "removing")
    _OURS.add(str(hidden))
    try:
        disk.CALLS.rename(str(path), str(hidden))
        disk.sync_folder(path.parent)
        disk.CALLS.remove(str(hidden))
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(f"remove {path}", error) from error
    finally:
        _OURS.discard(str(hidden))


def sweep(parent: Path | str) -> list[Path]:
    """Remove what dead processes have left unfinished in ``parent``; returns the folders."""
    removed = []
    for path in _entries(Path(parent)):
        match = _LEFTOVER.fullmatch(path.name)
        if match is not None and path.is_dir() and not _is_at_work(int(match["pid"]), path):
            with contextlib.suppress(OSError):  # another process sweeps too, or it is another user's
                disk.CALLS.remove(str(path))
                removed.append(path)
    return removed


def _is_at_work(pid: int, path: Path) -> bool:
    if pid == os.getpid():
        return str(path) in _OURS
    try:
        began = psutil.Process(pid).create_time()
        return began <= path.stat().st_mtime + 1  # else the number has passed on to another process
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
    except FileNotFoundError:
        return False


class Draft:
    """A checkpoint on its way: a folder beside the place that it will have."""

    def __init__(self, directory: Path) -> None:
        """Makes the folder, and its parents. Refuses a place that holds something else."""
        self.directory = Path(os.path.abspath(directory))  # noqa: PTH100  # a symbolic link stays one
        if self.directory.exists() and not _may_be_replaced(self.directory):
            raise SettingError(
                f"{directory} exists and is no checkpoint. Give a name that is free, or that of a checkpoint."
            )
        self.path = _beside(self.directory, "writing")
        self._done = False
        _OURS.add(str(self.path))
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            disk.CALLS.mkdir(str(self.path))
            disk.CALLS.mkdir(str(self.path / STORM))
        except OSError as error:
            self.discard()
            raise storage_error(f"create {self.path}", error) from error
        except BaseException:
            self.discard()
            raise

    def publish(self, step: int, records: Mapping[str, Record], versions: dict[str, str]) -> None:
        """Write the manifest and give the folder its name. ``records``: the files that are on the disk already."""
        known = dict(records)
        folders = {self.path / STORM}
        for path in sorted(self.path.rglob("*")):
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
        try:
            self._rename()
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise storage_error(f"rename {self.path} to {self.directory}", error) from error
        disk.sync_folder(self.directory.parent)
        self._done = True
        _OURS.discard(str(self.path))

    def _rename(self) -> None:
        """To the final name. A checkpoint that has it is exchanged in one step, where the file system can."""
        if not self.directory.exists() or not any(self.directory.iterdir()):
            disk.CALLS.rename(str(self.path), str(self.directory))
            return
        try:
            disk.CALLS.exchange(str(self.path), str(self.directory))
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
                raise
            remove(self.directory)
            disk.CALLS.rename(str(self.path), str(self.directory))
        else:
            disk.sync_folder(self.directory.parent)
            with contextlib.suppress(StorageError):  # the new one is there; the next sweep tries again
                remove(self.path)  # which is the old one now

    def discard(self) -> None:
        """Remove what was written, unless it is published. Never raises: what went wrong before must be heard."""
        if not self._done:
            self._done = True
            with contextlib.suppress(OSError):
                disk.CALLS.remove(str(self.path))
            _OURS.discard(str(self.path))


def _may_be_replaced(directory: Path) -> bool:
    if not directory.is_dir():
        return False
    return (directory / STORM / MANIFEST).is_file() or not any(directory.iterdir())


def _beside(path: Path, why: str) -> Path:
    stem = path.name
    match = _LEFTOVER.fullmatch(stem)
    if match is not None:
        stem = match["name"]
    return path.parent / f".{stem}.{why}-{os.getpid()}-{os.urandom(4).hex()}"


def _entries(parent: Path) -> list[Path]:
    try:
        return sorted(parent.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(f"list {parent}", error) from error


def describe_versions() -> dict[str, Any]:
    """Which versions wrote a checkpoint."""
    import numpy as np
    import torch

    ours = sys.modules[__name__.split(".", maxsplit=1)[0]].__version__
    return {"stormtorch": ours, "torch": str(torch.__version__), "numpy": np.__version__}
