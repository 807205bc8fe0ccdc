"""Tokens in flat files, cut into windows.

Row ``i`` of a file is tokens ``[i * stride, i * stride + sequence + extra)``. With the defaults (``extra=1``,
``stride`` = ``sequence``) neighbouring rows share one token, and each row holds inputs and targets: ``row[:, :-1]`` and
``row[:, 1:]``. So every token of a file but its first is a target exactly once in an epoch, and each row gives
``sequence`` predictions, a round number for kernels. Use ``extra=0`` for models that shift by themselves (Hugging
Face's ``labels``). Tokens at a file's end that do not fill a row are left out: less than one row for each file.

Documents follow each other without padding; a window may begin in one and end in another. Tokens are sent in the dtype
of the file, half or a quarter of int64, and cast on the device (``Cast`` in the loader's ``transform``, or
``batch.long()``), because torch has few operations for uint16.
"""

from __future__ import annotations

import os
from pathlib import Path

from ....core.errors import SettingError
from ...source import Field, FileSource, Shard, Strip
from ..columns import one_after_another
from ..dtypes import INTEGERS, name_of, parse_dtype
from ..paths import Paths, files_meant, name_of_paths, whole_number
from .flat_files import Flat, flat_parts
from .packed import is_packed


def tokens(
    paths: Paths, *, sequence: int = 2048, dtype: object = None, extra: int = 1, stride: int | None = None
) -> FileSource:
    """Windows of ``sequence`` + ``extra`` tokens, one every ``stride`` (= ``sequence``) tokens of each file.

    ``dtype``: that of files which do not name theirs, default uint16; another dtype than a file names is an error.
    Other columns of packed tokens (loss_mask, documents) are cut in the same way. Opens and checks every file; reads
    headers only.
    """
    length, extra = whole_number("sequence", sequence, 1), whole_number("extra", extra, 0)
    step = length if stride is None else whole_number("stride", stride, 1)
    given = None if dtype is None else parse_dtype(dtype)
    if given is not None and name_of(given) not in INTEGERS:
        raise SettingError(f"dtype={dtype!r} is not a dtype of tokens. Accepted: {', '.join(sorted(INTEGERS))}.")
    name = name_of_paths(paths)
    flats = [flat for path in _places(paths) for flat in flat_parts(path, given)]
    sources = [_windows(flat, length + extra, step) for flat in flats]
    if not any(source.rows for source in sources):
        longest = max(flat.count for flat in flats)
        raise SettingError(
            f"{name} has no rows: a row needs {length + extra} tokens (sequence={length}, extra={extra}), the longest "
            f"of {len(flats)} files has {longest}. Lower sequence, or give more data."
        )
    return one_after_another(name, sources)


def _places(paths: Paths) -> list[Path]:
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise SettingError("No paths were given. Name at least one file.")
    return [file for path in given for file in ([Path(path)] if is_packed(Path(path)) else files_meant(path))]


def _windows(flat: Flat, length: int, stride: int) -> FileSource:
    rows = max((flat.count - length) // stride + 1, 0)
    fields = tuple(Field(name=name, dtype=dtype, shape=(length,)) for name, dtype, _, _ in flat.columns)
    strips = tuple(
        Strip(path=path, offset=offset, stride=stride * dtype.itemsize) for _, dtype, path, offset in flat.columns
    )
    return FileSource(name=flat.name, fields=fields, shards=(Shard(rows=rows, strips=strips),))
