"""Packs arrays as rows, a few MiB at a time, in constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import SettingError, StorageError
from ...core.sizes import MiB
from ...memory.disk.calls import storage_errors
from ..formats.columns import selected
from ..formats.dtypes import name_of
from ..formats.open import open_source
from ..formats.paths import file_size, files_meant
from ..formats.tables.arrow import CompressedArrow, fields_of, read_batches, tensors_of
from ..formats.tables.hf_datasets import saved_files
from ..formats.text_lines import Progress
from ..source import DecodedSource, Field, FileSource, Shard, Strip
from .writer import PackWriter

_CHUNK_BYTES = 4 * MiB
Chunk = Mapping[str, Tensor]


def pack_rows(
    fields: Sequence[Field],
    chunks: Iterable[Chunk],
    out: Path,
    *,
    shard_bytes: int,
    dtype: torch.dtype | None = None,
    progress: Progress = lambda _: None,
) -> int:
    """Write the rows of ``chunks`` into ``out``; returns how many. ``dtype``: convert floats to it. Blocks."""
    if dtype is not None and not dtype.is_floating_point:
        raise SettingError(f"--dtype {name_of(dtype)}: rows convert floats only. Accepted: a floating dtype.")
    written = [
        replace(field, dtype=dtype) if dtype is not None and field.dtype.is_floating_point else field
        for field in fields
    ]
    with PackWriter(out, kind="rows", fields=written, shard_bytes=shard_bytes) as writer:
        for chunk in chunks:
            writer.write({field.name: chunk[field.name].to(field.dtype) for field in written})
            progress(sum(tensor.nbytes for tensor in chunk.values()))
    return writer.rows


def rows_to_pack(paths: Sequence[Path], columns: Sequence[str] | None) -> tuple[Sequence[Field], Iterator[Chunk], int]:
    """The fields of ``paths``, their rows in chunks, and the approximate size in bytes.

    As ``open_source`` opens them, but decodes compressed Arrow files too.
    """
    try:
        source = open_source(paths[0] if len(paths) == 1 else list(paths), columns=columns)
    except CompressedArrow:
        saved = saved_files(paths[0])
        files = saved[0] if saved else [file for path in paths for file in files_meant(path)]
        fields, chunks = arrow_chunks(files, saved[1] if saved and columns is None else columns)
        return fields, chunks, sum(file_size(file) for file in files)
    assert isinstance(source, FileSource | DecodedSource), "paths never give items"
    return source.fields, chunks_of(source), source.rows * source.row_bytes


def chunks_of(source: FileSource | DecodedSource) -> Iterator[Chunk]:
    """All rows of a source in order, a few MiB or one decoded group at a time."""
    if isinstance(source, DecodedSource):
        return map(source.decode, range(len(source.groups)))
    return (chunk for shard in source.shards for chunk in _chunks_of_shard(source.fields, shard))


def arrow_chunks(paths: Sequence[Path], columns: Sequence[str] | None) -> tuple[tuple[Field, ...], Iterator[Chunk]]:
    """The fields and rows of Arrow files, compressed or not."""

    def batches() -> Iterator[tuple[str, int, Any]]:
        for path in paths:
            row = 0
            for batch in read_batches(path):
                if batch.num_rows:
                    yield str(path), row, batch.select(selected(str(path), "columns", batch.schema.names, columns))
                row += batch.num_rows

    for path, row, batch in batches():
        fields = fields_of(batch, path, row)
        return fields, (tensors_of(fields, later, place, at) for place, at, later in batches())
    raise SettingError(f"{paths[0]} has no rows (files read: {len(paths)}). Give data with at least one row.")


def _chunks_of_shard(fields: Sequence[Field], shard: Shard) -> Iterator[Chunk]:
    widest = max(max(strip.stride, field.row_bytes) for strip, field in zip(shard.strips, fields, strict=True))
    step = max(_CHUNK_BYTES // widest, 1)
    for first in range(0, shard.rows, step):
        rows = min(step, shard.rows - first)
        yield {
            field.name: _rows_of_strip(field, strip, first, rows)
            for field, strip in zip(fields, shard.strips, strict=True)
        }


def _rows_of_strip(field: Field, strip: Strip, first: int, rows: int) -> Tensor:
    offset, count = strip.offset + first * strip.stride, (rows - 1) * strip.stride + field.row_bytes
    with storage_errors(f"read {strip.path}", numbers=f"{count} bytes at {offset}"):
        data = np.fromfile(strip.path, dtype=np.uint8, count=count, offset=offset)
    if len(data) < count:
        raise StorageError(
            f"{strip.path} ends at byte {offset + len(data)}, but {count} bytes at {offset} were expected: it was "
            "truncated while it was read. Restore it."
        )
    view = np.lib.stride_tricks.as_strided(data, (rows, field.row_bytes), (strip.stride, 1))
    return torch.from_numpy(np.ascontiguousarray(view)).view(-1).view(field.dtype).view(rows, *field.shape)
