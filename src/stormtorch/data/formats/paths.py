"""Finds the files that a path means, in order, and reads from them."""

from __future__ import annotations

import glob
import operator
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ...core.errors import SettingError
from ...memory.disk.calls import storage_errors
from ...memory.disk.contained import opened

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_BESIDE_DATA = frozenset({".json", ".md", ".txt", ".yaml", ".yml", ".sha256", ".idx", ".lock", ".log", ".py"})


def natural_order(path: Path) -> list[tuple[int, int, str]]:
    """A sort key that puts ``shard-10`` after ``shard-9``, and equal numbers in the order of their zeros."""
    parts = re.split(r"(\d+)", path.name)
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts if part]


def file_size(path: Path) -> int:
    """Bytes of a readable file. Raises StorageError if it is missing, not a plain file, or not readable."""
    with storage_errors(f"read {path}"), opened(path) as file:
        return os.fstat(file.fileno()).st_size


def read_at(path: Path, offset: int, count: int) -> bytes:
    """At most ``count`` bytes from ``offset``: fewer at the end of the file. Blocks."""
    with storage_errors(f"read {path}", numbers=f"{count} bytes at {offset}"), opened(path) as file:
        return os.pread(file.fileno(), count, offset)


def files_meant(what: str | os.PathLike[str], *, notes: bool = False) -> list[Path]:
    """The files that one path means: itself, a directory's data files, or the matches of a pattern like ``a-*.npy``.

    In a directory it skips hidden files, names that begin with an underscore, and, unless ``notes``, notes (.json, .md,
    .txt, an .idx beside its .bin, ...). It refuses directories inside, so that it never leaves data out silently.
    """
    path = Path(what)
    if path.is_dir():
        return _files_of(path, notes=notes)
    if not path.exists() and glob.has_magic(os.fspath(path)):
        found = sorted(map(Path, glob.glob(os.fspath(path))), key=natural_order)  # noqa: PTH207  # absolute ones too
        if not found:
            raise SettingError(f"No file matches {str(path)!r}. Correct the pattern.")
        return found
    return [path]


def name_of_paths(paths: Paths) -> str:
    """The name of these files in errors: the path, or the first and how many more."""
    if isinstance(paths, str | os.PathLike):
        return os.fspath(paths)
    return os.fspath(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def listed(paths: Paths, *, whole: Callable[[Path], bool] = lambda _: False) -> list[Path]:
    """The files that one or several paths mean, in order. ``whole``: whether a path is not to be looked into."""
    given = [Path(paths)] if isinstance(paths, str | os.PathLike) else [Path(path) for path in paths]
    if not given:
        raise SettingError("No paths were given. Name at least one file.")
    return [file for path in given for file in ([path] if whole(path) else files_meant(path))]


def _files_of(directory: Path, *, notes: bool) -> list[Path]:
    with storage_errors(f"list {directory}"):
        seen = [entry for entry in directory.iterdir() if not entry.name.startswith((".", "_"))]
    inner = sorted((entry for entry in seen if entry.is_dir()), key=natural_order)
    if inner:
        raise SettingError(
            f"{directory} has {len(inner)} directories in it, such as {inner[0].name!r}. "
            "Name the one that holds the data, or give a list of paths."
        )
    files = [entry for entry in seen if notes or entry.suffix.lower() not in _BESIDE_DATA]
    if not files:
        raise SettingError(f"{directory} holds no data files ({len(seen)} others). Name a directory of shards.")
    return sorted(files, key=natural_order)


def whole_number(setting: str, value: object, least: int) -> int:
    """``value`` as an int of at least ``least``, or a SettingError that names ``setting``."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # raises TypeError for other types
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise SettingError(f"{setting}={value!r} is not accepted. Accepted: whole numbers of at least {least}.")
    return number
