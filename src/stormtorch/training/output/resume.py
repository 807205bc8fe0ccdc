"""Finds the checkpoint that a run resumes from. A run never starts over in a folder with checkpoints by itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...checkpoint.folders.folder import all_complete, remove
from ...checkpoint.folders.manifest import check_complete, check_sums, read_manifest
from ...core.errors import CheckpointError, SettingError, StorageError, WrongModel
from ...data.loader import DataLoader
from ...memory.disk.calls import storage_errors
from ...session.api import Session
from ..reporting import Spent, Watcher
from ..settings.train_settings import TrainSettings
from .identity import RunRecord, check_same, of_schedule, read_run_file
from .run_folder import RunFolder


def candidates(folder: RunFolder, settings: TrainSettings) -> list[Path]:
    """Checkpoints to try, the best one first; empty: the run starts with its first step."""
    there = [path for path in sorted(folder.checkpoints.iterdir()) if path.is_dir() and path.name.startswith("step-")]
    if settings.resume == "never":
        if there:
            raise SettingError(
                f"{folder.checkpoints} holds {len(there)} checkpoints: --resume never would mix two runs. Use another "
                "--output, or delete them."
            )
        return []
    if settings.resume != "auto":
        return [_named(Path(settings.resume), folder)]
    home = os.path.realpath(folder.path)  # links may not lead out of an untrusted folder to other checkpoints
    found = [path for path in all_complete(folder.checkpoints) if Path(os.path.realpath(path)).is_relative_to(home)]
    if there and not found:
        raise CheckpointError(
            f"None of the {len(there)} checkpoints in {folder.checkpoints} is complete. Use another --output, or "
            "delete them."
        )
    return found[::-1]


def _named(path: Path, folder: RunFolder) -> Path:
    inside = all_complete(path / "checkpoints") or all_complete(path)
    if inside:
        raise SettingError(f"--resume {path} is a folder of checkpoints. Name one of them, such as {inside[-1]}.")
    check_complete(path)
    step = read_run_file(path).step
    later = [other for other in all_complete(folder.checkpoints) if read_run_file(other).step > step]
    if later:
        raise SettingError(
            f"{later[-1]} is of a later step than --resume {path}, and would count as the newest. Resume from it with "
            "--resume auto, or use another --output."
        )
    return path


class Resumed(NamedTuple):
    """The checkpoint that a run resumed from, and the cost of reading it."""

    path: Path
    record: RunRecord
    spent: Spent


def same_run(
    found: Sequence[Path], made_with: dict[str, Any], settings: TrainSettings, total: int, warn: Callable[[str], None]
) -> list[Path]:
    """The checkpoints of runs that give the same numbers; raises SettingError if one was made with other settings."""
    usable = []
    first: CheckpointError | None = None
    for path in found:
        try:
            record = read_run_file(path)
        except CheckpointError as error:
            first = first or error
            if path != found[-1]:
                warn(f"{error} Trying the checkpoint before it.")
            continue
        try:
            now = made_with
            if record.total is not None and record.total < total:  # the user may extend a run
                now = made_with | of_schedule(settings, record.total)
            check_same(path, record.made_with, now)
        except SettingError:
            if RunFolder.is_own(path) or settings.resume != "auto":
                raise
            warn(f"{path} is ignored: it was made with settings that give other numbers, and you named it.")
            continue
        if path == found[0] and not record.optimizer and settings.save_optimizer and record.step < total:
            raise SettingError(
                f"{path} holds the weights alone: resuming from it starts the optimizer again and changes the numbers. "
                "Give --no-save-optimizer if you want that, or delete it to resume from the one before it."
            )
        usable.append(path)
    if first is not None and not usable:
        raise first
    return usable


def go_on(
    found: Sequence[Path], session: Session, loader: DataLoader, folder: RunFolder, total: int, watcher: Watcher
) -> Resumed | None:
    """Load the first undamaged checkpoint of ``found``; None if ``found`` is empty. Warns of damaged ones."""
    first: Exception | None = None
    for path in found:
        began_s = time.perf_counter()
        try:
            session.load(path, also={"loader": loader})
        except (CheckpointError, StorageError) as error:
            damage = _damage(path) if isinstance(error, WrongModel) else error
            if damage is None:
                raise  # older ones are of the same model
            first = first or damage
            if path != found[-1]:
                watcher.warn(f"{damage} Trying the checkpoint before it.")
            continue
        seconds, record = time.perf_counter() - began_s, read_run_file(path)
        watcher.say(f"resumed    {path}: {record.step} of {total} steps are done (read in {seconds:.1f} s)")
        return Resumed(path, record, Spent(seconds, read_manifest(path).total_bytes))
    if first is None:
        return None
    raise CheckpointError(
        f"None of the {len(found)} checkpoints in {folder.checkpoints} can be used: {first}"
    ) from first


def _damage(path: Path) -> CheckpointError | None:
    """The damage of a checkpoint that seems to be of another model: a flipped bit may have changed a name.

    Reads all of its files."""
    try:
        manifest = check_complete(path)
        check_sums(path, manifest, manifest.files)
    except CheckpointError as error:
        return error
    return None


def tidy(folder: RunFolder, step: int, keep: int, watcher: Watcher) -> None:
    """Move checkpoints after ``step`` to ``damaged/``, and prune.

    They are damaged, or the run would have resumed from them, and must not count as the newest."""
    for path in sorted(folder.checkpoints.iterdir()):
        if folder.is_own(path) and int(path.name.removeprefix("step-")) > step:
            target = folder.damaged / path.name
            with storage_errors(f"move {path} to {target}"):
                target.parent.mkdir(exist_ok=True)
                if os.path.lexists(target):
                    remove(target)
                path.rename(target)
            watcher.say(f"damaged    {target}: moved there")
    folder.prune(keep)
