"""The manifest of a checkpoint: its files with their sizes and checksums. It is written last."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import CheckpointError, StorageError
from ...memory.disk.calls import storage_error
from ...memory.disk.contained import JSON_LIMIT_BYTES, inside, parse_json
from ..files import disk
from ..files.disk import Record

FORMAT = 1
STORM = "storm"  # the folder inside a checkpoint for files that only STORM reads
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint's manifest."""

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
    """Read the manifest of a checkpoint. Raises CheckpointError if there is none."""
    path = directory / STORM / MANIFEST
    if not path.is_file():
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a folder. Name a checkpoint.")
        raise CheckpointError(
            f"{directory} is not a checkpoint of STORM: it has no {STORM}/{MANIFEST}. Open a plain folder of weights "
            "with stormtorch.checkpoint.load_weights, or as --model."
        )
    try:
        content = parse_json(disk.read_whole(file_in(directory, f"{STORM}/{MANIFEST}"), limit_bytes=JSON_LIMIT_BYTES))
        if content["format"] > FORMAT:
            raise CheckpointError(
                f"{path} has format {content['format']}; this version reads up to {FORMAT}. Update stormtorch."
            )
        files = {str(name): Record(_count(f["bytes"]), int(f["crc32"], 16)) for name, f in content["files"].items()}
        return Manifest(_count(content["step"]), str(content["created"]), files, dict(content["versions"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}). Use another checkpoint.") from None


def _count(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value


def file_in(directory: Path, name: str) -> Path:
    """The path of a checkpoint's file. Raises CheckpointError if a name or a link leads out of the folder."""
    try:
        return inside(directory, name)
    except StorageError as error:
        raise CheckpointError(str(error)) from None


def is_tensors(name: str) -> bool:
    """Whether a checkpoint's file holds tensors: reading them computes the checksum."""
    return name.endswith(".safetensors")


def check_sums(directory: Path, manifest: Manifest, names: Iterable[str], *, remedy: str | None = None) -> None:
    """Read these files and compare their checksums; raises CheckpointError for the first that differs."""
    options = {} if remedy is None else {"remedy": remedy}
    for name in names:
        path = file_in(directory, name)
        disk.check(path, disk.sum_of(path), manifest.files[name], **options)


def check_as_model(directory: Path, *, tensors: bool = False) -> None:
    """Verify the small files of a checkpoint that is opened as a model; with ``tensors``, all its files.

    Other folders have no checksums."""
    if (directory / STORM / MANIFEST).is_file():
        manifest = check_complete(directory)
        names = [name for name in manifest.files if not name.startswith(f"{STORM}/")]
        remedy = f"Copy it again; if you changed it yourself, remove {directory / STORM}, which holds the checksums."
        check_sums(directory, manifest, [name for name in names if tensors or not is_tensors(name)], remedy=remedy)


def check_complete(directory: Path) -> Manifest:
    """The manifest, if all its files exist with their sizes; raises CheckpointError otherwise."""
    manifest = read_manifest(directory)
    for name, record in manifest.files.items():
        try:
            size = os.stat(file_in(directory, name)).st_size  # noqa: PTH116  # one call per file
        except FileNotFoundError:
            raise CheckpointError(f"{directory / name} is missing. Use another checkpoint.") from None
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ENAMETOOLONG):
                raise CheckpointError(f"{directory / name[:200]} is missing. Use another checkpoint.") from None
            raise storage_error(f"look at {directory / name}", error) from error
        if size != record.size:
            raise CheckpointError(
                f"{directory / name} has {size} bytes where {record.size} were written. Use another checkpoint."
            )
    return manifest


def describe_versions() -> dict[str, Any]:
    """The versions of the packages that write this checkpoint."""
    import numpy as np
    import torch

    ours = sys.modules[__name__.split(".", maxsplit=1)[0]].__version__
    return {"stormtorch": ours, "torch": str(torch.__version__), "numpy": np.__version__}
