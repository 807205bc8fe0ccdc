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

from dataclasses import replace

from ....core.errors import SettingError
from ...source import FileSource, Shard
from ..columns import one_after_another
from ..dtypes import INTEGERS, name_of, parse_dtype
from ..paths import Paths, listed, name_of_paths, whole_number
from .flat_files import flat_tokens
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
    flats = [flat_tokens(path, given) for path in listed(paths, whole=is_packed)]
    sources = [_windows(flat, length + extra, step) for flat in flats]
    if not any(source.rows for source in sources):
        counts = [shard.rows for flat in flats for shard in flat.shards]
        raise SettingError(
            f"{name} has no rows: a row needs {length + extra} tokens (sequence={length}, extra={extra}), the longest "
            f"of {len(counts)} files has {max(counts)}. Lower sequence, or give more data."
        )
    return one_after_another(name, sources)


def _windows(flat: FileSource, length: int, stride: int) -> FileSource:
    shards = []
    for shard in flat.shards:
        rows = max((shard.rows - length) // stride + 1, 0)
        strips = tuple(replace(strip, stride=stride * strip.stride) for strip in shard.strips)
        shards.append(Shard(rows=rows, strips=strips))
    fields = tuple(replace(field, shape=(length,)) for field in flat.fields)
    return FileSource(name=flat.name, fields=fields, shards=tuple(shards))
