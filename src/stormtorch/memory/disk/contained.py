"""Reads and writes files of folders from untrusted sources: inside of their folder, through no link out of it.

A name in an index, a link, a pipe where a file should be, JSON of a million brackets: each is refused in words.
Refusals raise StorageError, or ValueError where only the caller knows the file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ...core.errors import StorageError
from ...core.sizes import MiB, format_bytes
from .calls import storage_error

_LONGEST_NAME = 255  # in bytes, on Linux
JSON_LIMIT_BYTES = 256 * MiB  # the largest index on the Hub has a few MiB


def inside(folder: Path, name: str) -> Path:
    """The path of ``name`` in ``folder``. Raises StorageError if the name, or a link on the way, leads out of it.

    A link to the folder itself is allowed: the user made it. So are links of the Hub's cache, which lead from a
    snapshot to its blobs, within the folder that holds both. The file need not exist.
    """
    parts = name.split("/")
    too_long = any(len(part.encode(errors="replace")) > _LONGEST_NAME for part in parts)
    if not name or "\0" in name or name.startswith("/") or ".." in parts or too_long:
        raise StorageError(f"{folder} names the file {name[:200]!r}, which is not in it. Do not use this folder.")
    path = folder / name
    try:
        real, home = os.path.realpath(path), os.path.realpath(folder)
    except (OSError, ValueError) as error:
        raise StorageError(f"{folder} names the file {name[:200]!r}, which is not a valid name ({error}).") from error
    if not any(real == root or real.startswith(root.rstrip("/") + "/") for root in (home, *_blobs(home))):
        raise StorageError(
            f"{path} is a link that leads out of its folder, to {real}. Copy the file there if you trust it."
        )
    return path


def _blobs(folder: str) -> list[str]:
    snapshots = os.path.dirname(folder)  # noqa: PTH120
    return [os.path.join(os.path.dirname(snapshots), "blobs")] if os.path.basename(snapshots) == "snapshots" else []  # noqa: PTH118, PTH119, PTH120


def check_no_link(path: Path) -> None:
    """Raise StorageError if ``path`` is a link: writing or removing there would change another place."""
    if path.is_symlink():
        raise StorageError(
            f"{path} is a link: writing or removing there would change another place. Remove the link, or name its "
            "target."
        )


def open_to_write(path: Path, *, append: bool) -> int:
    """Open a plain file for writing and return its descriptor; creates it, follows no link, and empties nothing.

    Without ``append`` the file must be new. Raises OSError.
    """
    how = os.O_APPEND if append else os.O_EXCL
    # NONBLOCK: opening a pipe would wait for its reader.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | how
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            check_no_link(path)
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StorageError(f"{path} is not a plain file, and a run writes there. Remove it.")
    return fd


def replace_file(path: Path, text: str) -> None:
    """Put a new file with ``text`` at ``path``; writes to nothing that has the name, such as a link. Raises OSError."""
    beside = path.with_name(f".{path.name}.writing-{os.getpid()}-{os.urandom(4).hex()}")
    with os.fdopen(open_to_write(beside, append=False), "w", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            os.replace(beside, path)  # noqa: PTH105
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a plain file for reading. Refuses a pipe or a device instead of waiting for it. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise StorageError(f"Cannot read {path}: it is not a plain file. Copy a file there.")
        yield file


def read_small(path: Path, *, limit_bytes: int = JSON_LIMIT_BYTES) -> bytes:
    """All bytes of a plain file, which must not be larger than ``limit_bytes``. Raises StorageError."""
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit_bytes:
                raise StorageError(
                    f"{path} has {format_bytes(size)}; such a file has at most {format_bytes(limit_bytes)}. Copy it "
                    "again."
                )
            return file.read()
    except StorageError:
        raise
    except (OSError, ValueError) as error:
        cause = error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error))
        raise storage_error(f"read {path}", cause) from error


def parse_json(data: bytes | bytearray | str, *, repeated: bool = True) -> Any:
    """Parse JSON text. Raises ValueError for any defect, and for repeated names unless ``repeated``."""
    try:
        return json.loads(data, object_pairs_hook=None if repeated else _once)
    except (RecursionError, MemoryError) as error:
        raise ValueError("it is nested too deeply" if isinstance(error, RecursionError) else "too large") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{twice[:200]!r} occurs twice")
    return found
