"""A hash of a dataset's content, made of samples, by which a loader's state recognises its data.

It contains neither paths nor times, because states and data move between machines. A source of at most 4 MiB is read
whole; of a larger one 256 rows, evenly spread from the first to the last, and at most 8 KiB of each field. So it
detects other data of the same form, but not a change to a few rows of many.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from ...core.sizes import KiB, MiB
from ...memory.disk.calls import storage_errors
from ...memory.disk.contained import opened
from ..formats.items import ItemSource
from ..readers.layout import Layout
from ..source import DecodedSource, FileSource

_SMALL_BYTES = 4 * MiB
_SAMPLES = 256
_MAX_OPEN_FILES = 64
_PIECE_BYTES = 4 * KiB


def content_of(source: FileSource | DecodedSource | ItemSource) -> str:
    """The hash. Blocks while it reads samples; raises StorageError. Reads no items of a torch Dataset."""
    found = hashlib.blake2b(digest_size=8)
    if isinstance(source, FileSource):
        pieces = _of_rows(source)
    elif isinstance(source, DecodedSource):
        pieces = _of_files(source) if source.files() else _of_tables(source)
    else:
        pieces = iter((str(source.rows).encode(),))
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def _spread(count: int, most: int) -> list[int]:
    """At most ``most`` of ``count`` numbers, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [number * (count - 1) // (most - 1) for number in range(most)]


def _of_rows(source: FileSource) -> Iterator[bytes]:
    strips = [(shard.rows, *pair) for shard in source.shards for pair in zip(shard.strips, source.fields, strict=True)]
    spans = [(rows - 1) * strip.stride + field.row_bytes if rows else 0 for rows, strip, field in strips]
    with closing(_OpenFiles()) as files:
        if sum(spans) <= _SMALL_BYTES:
            for span, (rows, strip, field) in zip(spans, strips, strict=True):
                data = files.read(strip.path, strip.offset, span)
                begins = range(0, rows * strip.stride, strip.stride)
                gaps = strip.stride > field.row_bytes  # other fields, which the user may have left out
                yield b"".join(data[at : at + field.row_bytes] for at in begins) if gaps else data
            return
        layout = Layout(source)
        for row in _spread(source.rows, _SAMPLES):
            for number, field in enumerate(source.fields):
                file, _, end = layout.place_of(row, number)
                path, begin = layout.files[file], end - field.row_bytes
                if field.row_bytes <= 2 * _PIECE_BYTES:
                    yield files.read(path, begin, field.row_bytes)
                else:
                    yield files.read(path, begin, _PIECE_BYTES)
                    yield files.read(path, end - _PIECE_BYTES, _PIECE_BYTES)


def _of_files(source: DecodedSource) -> Iterator[bytes]:
    """Samples of the encoded files."""
    paths = source.files()
    with closing(_OpenFiles()) as files:
        for path in (paths[number] for number in _spread(len(paths), _SAMPLES)):
            size = files.size(path)
            yield str(size).encode()
            places = _spread(max(size // _PIECE_BYTES, 1), max(_SAMPLES // len(paths), 4))
            for at in (*(place * _PIECE_BYTES for place in places), max(size - _PIECE_BYTES, 0)):
                yield files.read(path, at, _PIECE_BYTES)


def _of_tables(source: DecodedSource) -> Iterator[bytes]:
    for group in _spread(len(source.groups), 16):
        rows = source.decode(group)
        for field in source.fields:
            tensor = rows[field.name]
            chosen = tensor[_spread(len(tensor), _SAMPLES // 16)].contiguous()
            yield np.asarray(chosen.view(-1).view(torch.uint8)).tobytes()


class _OpenFiles:
    """A few open files: consecutive rows mostly lie in one."""

    def __init__(self) -> None:
        self._open: dict[Path, BinaryIO] = {}
        self._stack = ExitStack()

    def close(self) -> None:
        self._open.clear()
        self._stack.close()

    def _file(self, path: Path) -> BinaryIO:
        if path not in self._open:
            if len(self._open) == _MAX_OPEN_FILES:
                self.close()
            with storage_errors(f"read {path}"):
                self._open[path] = self._stack.enter_context(opened(path))
        return self._open[path]

    def size(self, path: Path) -> int:
        return os.fstat(self._file(path).fileno()).st_size

    def read(self, path: Path, at: int, count: int) -> bytes:
        """Read; fewer bytes if the file is truncated, which reading the row will report."""
        with storage_errors(f"read {path}", numbers=f"{count} bytes at {at}"):
            return os.pread(self._file(path).fileno(), count, at)
