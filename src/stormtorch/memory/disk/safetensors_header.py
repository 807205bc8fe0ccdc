"""Parses the header of a safetensors file without the library, which would map the file.

A file is 8 bytes (the header's length, little endian), a JSON header (name to dtype, shape, and first and last byte in
the payload), and the payload.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .contained import parse_json

DTYPES = {
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
HEADER_LIMIT = 100_000_000  # of the format
_MAX_DIMENSIONS = 64  # of torch


class UnknownDtype(ValueError):
    """A tensor has a dtype that torch does not have; the message names both."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file; ``start`` counts from the file's first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int


def header_length(head: bytes | bytearray) -> int:
    """The length in the first 8 bytes of a file."""
    return int(struct.unpack_from("<Q", head)[0])


def parse_header(read: Callable[[int, int], bytes | bytearray], size: int) -> dict[str, Entry]:
    """The tensors of a file of ``size`` bytes by name, in the order of their bytes; ``read`` takes offset and count.

    Raises ValueError with the reason if the file is damaged.
    """
    head = read(0, min(8, size))
    length = header_length(head) if len(head) == 8 else 0
    if not 2 <= length <= min(size - 8, HEADER_LIMIT):
        raise ValueError(f"{size} bytes cannot hold the header")
    try:
        content = parse_json(read(8, length), repeated=False)
        if not isinstance(content, dict):
            raise ValueError(f"it is a {type(content).__name__}")
    except ValueError as error:
        raise ValueError(f"the header is not a JSON object: {error}") from None
    content.pop("__metadata__", None)
    entries = {name: _entry(name, value, 8 + length, size) for name, value in content.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: item[1].start))
    end = 0
    for name, entry in ordered.items():
        if entry.size and entry.start < end:
            raise ValueError(f"{name!r} begins at byte {entry.start}, within the tensor before it")
        end = max(end, entry.start + entry.size)
    return ordered


def _entry(name: str, value: Any, base: int, size: int) -> Entry:
    try:
        dtype, shape = str(value["dtype"]), tuple(map(_count, value["shape"]))
        first, last = map(_count, value["data_offsets"])
        if len(shape) > _MAX_DIMENSIONS:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"the entry of {name[:200]!r} is not readable") from None
    if dtype not in DTYPES:
        raise UnknownDtype(f"{name!r} has dtype {dtype[:40]}. Accepted: {', '.join(DTYPES)}.")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if last - first != needed:
        raise ValueError(f"{name!r} of shape {shape} needs {needed} bytes and has {last - first}")
    if base + last > size:
        raise ValueError(f"truncated: {name!r} ends at byte {base + last}, the file at {size}")
    return Entry(DTYPES[dtype], shape, base + first, needed)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError
    return value
