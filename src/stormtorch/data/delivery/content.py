"""A short name for what a dataset holds, made of samples: by it a loader's state knows its data again.

Neither paths nor times are in it, since states and data move between machines. Of a source of at most 4 MiB every byte
is read; of a larger one 256 rows, evenly spread, the first and the last of them included, and of a row at most 8 KiB a
field. So other data of the same form is told apart, and a change to a few rows of many is not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from ...core.sizes import KiB, MiB
from ...memory.disk.calls import storage_error
from ...memory.disk.contained import opened
from ..formats.items import ItemSource
from ..readers.layout import Layout
from ..source import DecodedSource, FileSource

_SMALL_BYTES = 4 * MiB
_SAMPLES = 256
_MOST_FILES = 64  # held open at a time
_PIECE_BYTES = 4 * KiB


def content_of(source: FileSource | DecodedSource | ItemSource) -> str:
    """The name. Blocks while samples are read; raises StorageError. Items of a torch Dataset are not asked for."""
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
    """At most ``most`` of ``count`` numbers, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [number * (count - 1) // (most - 1) for number in range(most)]


def _of_rows(source: FileSource) -> Iterator[bytes]:
    strips = [(shard.rows, *pair) for shard in source.shards for pair in zip(shard.strips, source.fields, strict=True)]
    spans = [(rows - 1) * strip.stride + field.row_bytes if rows else 0 for rows, strip, field in strips]
    files = _Files()
    with files:
        if sum(spans) <= _SMALL_BYTES:
            for span, (rows, strip, field) in zip(spans, strips, strict=True):
                data = files.read(strip.path, strip.offset, span)
                begins = range(0, rows * strip.stride, strip.stride)
                gaps = strip.stride > field.row_bytes  # other fields, which may not be read
                yield b"".join(data[at : at + field.row_bytes] for at in begins) if gaps else data
            return
        layout = Layout(source)
        for row in _spread(source.rows, _SAMPLES):
            for number, field in enumerate(source.fields):
                path, _, end = layout.place_of(row, number)
                begin = end - field.row_bytes
                if field.row_bytes <= 2 * _PIECE_BYTES:
                    yield files.read(path, begin, field.row_bytes)
                else:
                    yield files.read(path, begin, _PIECE_BYTES)
                    yield files.read(path, end - _PIECE_BYTES, _PIECE_BYTES)


def _of_files(source: DecodedSource) -> Iterator[bytes]:
    """Of what has to be decoded, the bytes before that."""
    paths = source.files()
    files = _Files()
    with files:
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


class _Files:
    """Open files, a few at a time; rows that follow each other mostly lie in one."""

    def __init__(self) -> None:
        self._open: dict[Path, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        self._open.clear()
        self._stack.close()

    def _file(self, path: Path) -> BinaryIO:
        if path not in self._open:
            if len(self._open) == _MOST_FILES:
                self._close()
            try:
                self._open[path] = self._stack.enter_context(opened(path))
            except OSError as error:
                raise storage_error(f"read {path}", error) from error
        return self._open[path]

    def size(self, path: Path) -> int:
        return os.fstat(self._file(path).fileno()).st_size

    def read(self, path: Path, at: int, count: int) -> bytes:
        """Fewer bytes where the file was cut short: reading the row says so."""
        try:
            return os.pread(self._file(path).fileno(), count, at)
        except OSError as error:
            raise storage_error(f"read {path}", error, numbers=f"{count} bytes at {at}") from error
