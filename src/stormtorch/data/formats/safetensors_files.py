"""safetensors files: every tensor is a field; its first dimension is the rows.

A file is 8 bytes (the header's length, little endian), a JSON header (name to dtype, shape, and first and last byte in
the payload), and the payload. This module reads the header itself, because the library would map the file.
"""

from __future__ import annotations

import itertools
import math
import struct
from pathlib import Path
from typing import Any

import torch

from ...core.errors import SettingError, StorageError
from ...memory.disk.contained import parse_json
from ..source import Field, FileSource, Shard, Strip
from .paths import file_size, read_at

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_HEADER_LIMIT = 100_000_000  # of the format
_MAX_DIMENSIONS = 64  # of torch


def safetensors_source(path: Path) -> FileSource:
    """The rows of one file, its tensors side by side in the order of their names. Reads the header only."""
    size = file_size(path)
    start, header = _header(path, size)
    fields, strips, counted = [], [], ("", 0)
    taken: list[tuple[int, int, str]] = []
    for name in sorted(header):
        dtype, shape, first, last = _entry(path, name, header[name])
        needed = math.prod(shape) * dtype.itemsize
        if last - first != needed:
            raise _damaged(path, f"tensor {name!r} of shape {shape} needs {needed} bytes and has {last - first}")
        if start + last > size:
            raise StorageError(
                f"{path} is truncated: tensor {name!r} ends at byte {start + last}, the file at {size}. Copy it again."
            )
        if not shape:
            raise SettingError(
                f"{path}: tensor {name!r} is a single number and has no rows. Save it with rows, or leave it out."
            )
        if counted[0] and shape[0] != counted[1]:
            raise SettingError(
                f"{path}: tensor {counted[0]!r} has {counted[1]} rows, {name!r} has {shape[0]}. The tensors of a file "
                "are the fields of its rows: their first dimensions must be equal."
            )
        taken.append((start + first, start + last, name))
        counted = name, shape[0]
        field = Field(name=name, dtype=dtype, shape=shape[1:])
        if field.row_bytes == 0:
            raise SettingError(f"{path}: tensor {name!r} has rows of zero bytes (shape {shape}). Leave it out.")
        fields.append(field)
        strips.append(Strip(path=path, offset=start + first, stride=field.row_bytes))
    taken.sort()
    for (_, end, before), (begin, _, name) in itertools.pairwise(taken):
        if begin < end:
            raise _damaged(path, f"tensor {name!r} begins within {before!r}")
    if not fields:
        raise SettingError(f"{path} holds no tensors. Name a file with at least one.")
    return FileSource(name=str(path), fields=tuple(fields), shards=(Shard(rows=counted[1], strips=tuple(strips)),))


def is_safetensors(path: Path, head: bytes) -> bool:
    """Whether a file that begins with ``head`` (16 bytes) looks like one."""
    return path.suffix == ".safetensors" or (len(head) > 8 and head[8:9] == b"{" and _length(head) < _HEADER_LIMIT)


def _length(head: bytes) -> int:
    return int(struct.unpack_from("<Q", head)[0])


def _header(path: Path, size: int) -> tuple[int, dict[str, Any]]:
    head = read_at(path, 0, 8)
    if len(head) < 8 or not 2 <= _length(head) <= min(size - 8, _HEADER_LIMIT):
        raise _damaged(path, f"{size} bytes cannot hold the header")
    try:
        header = parse_json(read_at(path, 8, _length(head)), repeated=False)
        if not isinstance(header, dict):
            raise ValueError("the header is not an object")
    except ValueError as error:
        raise _damaged(path, f"the header is not a JSON object: {error}") from error
    header.pop("__metadata__", None)
    return 8 + _length(head), header


def _entry(path: Path, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        first, last = entry["data_offsets"]
        good = all(type(number) is int and 0 <= number < 1 << 63 for number in (*shape, first, last))
        good = good and isinstance(dtype, str) and len(shape) <= _MAX_DIMENSIONS
    except (KeyError, TypeError, ValueError):
        good = False
    if not good:
        raise _damaged(path, f"the entry of tensor {name!r} is not readable")
    if dtype not in _DTYPES:
        raise SettingError(f"{path}: tensor {name!r} has dtype {dtype[:40]}. Accepted: {', '.join(_DTYPES)}.")
    return _DTYPES[dtype], shape, first, last


def _damaged(path: Path, why: str) -> StorageError:
    return StorageError(f"{path} is not a complete safetensors file ({why}). Copy or write it again.")
