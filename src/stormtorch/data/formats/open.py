"""Recognises a source of data: an object by its type, a path by its content."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from ...core.errors import SettingError
from ..source import DecodedSource, FileSource
from .columns import choose, one_after_another, side_by_side
from .items import ItemSource, item_source
from .paths import file_size, files_meant, name_of_paths, read_at
from .plain.arrays import memmap_source, npy_source
from .plain.packed import is_packed, packed_source
from .plain.safetensors_files import is_safetensors, safetensors_source
from .tables.arrow import arrow_source
from .tables.hf_datasets import dataset_source, is_dataset, saved_files
from .tables.parquet import ParquetSource

Source = FileSource | DecodedSource | ItemSource
Kind = Literal[".npy", "safetensors", "Arrow", "Parquet"]
Columns = Sequence[str] | None


def open_source(what: object, *, columns: Columns = None) -> Source:
    """Open ``what`` as a source. Reads headers, but no data, and keeps no file open.

    Accepts a path, a pattern, a list of paths or a directory: files of one kind (.npy, safetensors, Arrow, Parquet),
    which are shards in natural order of their names, or a directory that STORM packed or ``datasets`` saved. A dict of
    name to any of these puts fields side by side. ``tokens(...)`` and ``raw(...)`` are for files that do not describe
    themselves. Also an ``np.memmap``, a ``datasets.Dataset``, or any map-style torch ``Dataset``.

    ``columns``: the fields to read, in that order; default: all.
    """
    if isinstance(columns, str):
        columns = [columns]
    if isinstance(what, str | os.PathLike):
        return _open_path(Path(what), columns)
    if isinstance(what, list | tuple):
        return _open_list(what, columns)
    if is_dataset(what):
        return dataset_source(what, columns)
    if isinstance(what, Mapping):
        source: Source = _open_fields(what)
    elif isinstance(what, np.memmap):
        source = memmap_source(what)
    else:
        source = what if isinstance(what, FileSource | DecodedSource | ItemSource) else item_source(what)
    if columns is None:
        return source
    if not isinstance(source, FileSource):
        raise SettingError(f"columns={list(columns)!r} does not work with {source.name}. Select them where it is made.")
    return choose(source, columns)


def _open_fields(what: Mapping[object, object]) -> FileSource:
    if not what:
        raise SettingError("An empty dict names no fields. Give at least one name and path.")
    sources = {}
    for name, value in what.items():
        source = open_source(value)
        if not isinstance(source, FileSource):
            raise SettingError(
                f"Field {name!r} is {source.name}, whose rows cannot be read straight from a file, so it cannot be "
                "combined. Give .npy, raw, tokens, safetensors or uncompressed Arrow, or `storm data pack` it."
            )
        sources[str(name)] = source
    return side_by_side(f"{{{', '.join(sources)}}}", sources)


def _open_list(what: Sequence[object], columns: Columns) -> Source:
    if not what:
        raise SettingError("An empty list names no data. Give at least one path.")
    paths = [part for part in what if isinstance(part, str | os.PathLike) and not Path(part).is_dir()]
    if len(paths) == len(what):
        return open_files(name_of_paths(paths), [file for path in paths for file in files_meant(path)], columns)
    sources = [open_source(part, columns=columns) for part in what]
    files = [source for source in sources if isinstance(source, FileSource)]
    if len(files) < len(sources):
        other = next(source for source in sources if not isinstance(source, FileSource))
        raise SettingError(
            f"{other.name} is in a list, but its rows cannot be read straight from a file. A list may hold paths "
            "of files of one kind, or sources of .npy, raw, tokens, safetensors, packed or uncompressed Arrow data."
        )
    return one_after_another(f"{files[0].name} and {len(files) - 1} more", files)


def _open_path(path: Path, columns: Columns) -> Source:
    if is_packed(path):
        return choose(packed_source(path, "rows"), columns)
    files, chosen = (saved_files(path) if path.is_dir() else None) or (files_meant(path), None)
    return open_files(str(path), files, chosen if columns is None else columns)


def open_files(name: str, paths: Sequence[Path], columns: Columns = None) -> Source:
    """Files of one kind as the shards of one source."""
    kinds = [kind_of(path) for path in paths]
    for path, kind in zip(paths, kinds, strict=True):
        if kind != kinds[0]:
            raise SettingError(
                f"{name} mixes kinds: {paths[0].name} is {kinds[0]}, {path.name} is {kind}. Give one kind."
            )
    if kinds[0] == "Parquet":
        return ParquetSource(name, paths, columns)
    if kinds[0] == "Arrow":
        return one_after_another(name, [arrow_source(path, columns) for path in paths])
    read = npy_source if kinds[0] == ".npy" else safetensors_source
    return choose(one_after_another(name, [read(path) for path in paths]), columns)


def kind_of(path: Path) -> Kind:
    """The kind of a file, by its first bytes. Raises SettingError for kinds without a reader."""
    head = read_at(path, 0, 16)
    if head.startswith(b"\x93NUMPY"):
        return ".npy"
    if head.startswith(b"PAR1"):
        return "Parquet"
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "Arrow"
    if is_safetensors(path, head):
        return "safetensors"
    if head.startswith(b"PK\x03\x04"):
        raise SettingError(f"{path} is a zip or .npz archive. Save each array on its own with np.save.")
    raise SettingError(
        f"{path} ({file_size(path)} bytes) is of no known kind. Accepted: .npy, safetensors, Arrow, Parquet; for flat "
        "files raw(path, dtype=, shape=) or tokens(path, sequence=); for text `storm data pack`."
    )
