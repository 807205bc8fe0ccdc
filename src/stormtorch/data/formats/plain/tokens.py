"""Tokens in flat files, cut into windows.

Row ``i`` of a file is tokens ``[i * stride, i * stride + sequence + extra)``. With the defaults (``extra=1``,
``stride`` = ``sequence``) neighbouring rows share one token, and each row holds inputs and targets: ``row[:, :-1]`` and
``row[:, 1:]``. So every token of a file but its first is a target exactly once in an epoch, and each row gives
``sequence`` predictions, a round number for kernels. Use ``extra=0`` for models that shift by themselves (Hugging
Face's ``labels``). Tokens at a file's end that do not fill a row are left out: less than one row for each file.

The content tells the kind of a file: STORM's packed directories, ``.npy`` of one dimension, Megatron's ``.bin`` with an
``.idx`` beside it, llm.c's ``.bin`` (a header of 256 int32), or no header, as nanoGPT writes them.

Documents follow each other without padding; a window may begin in one and end in another. Tokens are sent in the dtype
of the file, half or a quarter of int64, and cast on the device (``Cast`` in the loader's ``transform``, or
``batch.long()``), because torch has few operations for uint16.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ....core.errors import SettingError, StorageError
from ...source import Field, FileSource, Shard
from ..columns import describe, one_after_another
from ..dtypes import BY_NAME, INTEGERS, name_of, parse_dtype
from ..paths import Paths, file_size, listed, name_of_paths, read_at, whole_number
from .arrays import array_source, npy_source
from .packed import is_packed, packed_source

NAME = "tokens"
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, documents; then lengths, pointers
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_LLMC_DTYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}  # by magic and version
_LLMC_HEADER_BYTES = 1024


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
    flats = [_flat_tokens(path, given) for path in listed(paths, whole=is_packed)]
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


def _flat_tokens(path: Path, given: torch.dtype | None) -> FileSource:
    """The tokens of one file or packed directory, each a row. ``given``: the dtype that the user names, if any."""
    if is_packed(path):
        flat = packed_source(path, "tokens")
    else:
        size = file_size(path)
        index = path.with_suffix(".idx")
        head = read_at(path, 0, 4 * 3)
        if head.startswith(b"\x93NUMPY"):
            flat = _npy(path)
        elif path.suffix == ".bin" and index.exists():
            flat = _megatron(path, index, size)
        elif len(head) == 12 and struct.unpack_from("<2i", head) in _LLMC_DTYPES and size >= _LLMC_HEADER_BYTES:
            flat = _llmc(path, head, size)
        else:
            flat = _headless(path, given, size)
    found = flat.fields[0].dtype
    if given is not None and found != given:
        raise SettingError(
            f"{path} holds {name_of(found)} tokens, and dtype={name_of(given)!r} was given. Leave dtype out."
        )
    return flat


def _flat(path: Path, dtype: torch.dtype, count: int, offset: int = 0) -> FileSource:
    return array_source(path, [(Field(name=NAME, dtype=dtype, shape=()), 0)], count, offset, dtype.itemsize)


def _npy(path: Path) -> FileSource:
    source = npy_source(path)
    field, shard = source.fields[0], source.shards[0]
    if len(source.fields) != 1 or field.shape or name_of(field.dtype) not in INTEGERS:
        raise SettingError(
            f"{path} holds {describe(source.fields)} in each row, not flat tokens. "
            "Accepted: one dimension of integers. Rows of a fixed length need no tokens(): give the path itself."
        )
    return _flat(path, field.dtype, shard.rows, shard.strips[0].offset)


def _megatron(path: Path, index: Path, size: int) -> FileSource:
    """Megatron's ``.bin``: sequences one after another. The ``.idx`` holds their dtype, lengths and offsets."""
    whole = file_size(index)
    head = read_at(index, 0, _MEGATRON_HEADER.size)
    if len(head) < _MEGATRON_HEADER.size or not head.startswith(_MEGATRON_MAGIC):
        raise StorageError(
            f"{index} is not a Megatron index ({whole} bytes, wrong magic), but it lies beside {path.name}. "
            "Move it away to read the .bin as flat tokens."
        )
    _, version, code, sequences, documents = _MEGATRON_HEADER.unpack(head)
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise StorageError(f"{index} has version {version} and dtype code {code}. Accepted: version 1, integer dtypes.")
    pointers = _MEGATRON_HEADER.size + 4 * sequences
    expected = pointers + 8 * sequences + 8 * documents
    if whole < expected:
        raise StorageError(
            f"{index} is truncated: {whole} bytes, its header promises {expected} ({sequences} sequences, "
            f"{documents} documents). Copy or write it again."
        )
    dtype = BY_NAME[_MEGATRON_DTYPES[code]]
    promised = 0
    if sequences:
        (last_length,) = struct.unpack("<i", read_at(index, pointers - 4, 4))
        (last_place,) = struct.unpack("<q", read_at(index, pointers + 8 * (sequences - 1), 8))
        promised = last_place + last_length * dtype.itemsize
    if size != promised:
        raise StorageError(
            f"{path} has {size} bytes, its index promises {promised} ({sequences} sequences of {name_of(dtype)}). "
            "One of them is truncated, or they do not belong together."
        )
    return _flat(path, dtype, size // dtype.itemsize)


def _llmc(path: Path, head: bytes, size: int) -> FileSource:
    """llm.c's ``.bin``: 256 int32 (magic, version, number of tokens, zeros), then the tokens."""
    magic, version, count = struct.unpack("<3i", head)
    dtype = BY_NAME[_LLMC_DTYPES[magic, version]]
    promised = _LLMC_HEADER_BYTES + count * dtype.itemsize
    if size != promised:
        raise StorageError(
            f"{path} has {size} bytes, its header promises {promised} ({count} tokens of {name_of(dtype)}). "
            "It is truncated or damaged: write it again."
        )
    return _flat(path, dtype, count, _LLMC_HEADER_BYTES)


def _headless(path: Path, given: torch.dtype | None, size: int) -> FileSource:
    dtype = given or torch.uint16
    count, rest = divmod(size, dtype.itemsize)
    if rest:
        raise StorageError(
            f"{path} has {size} bytes, which is not a whole number of {name_of(dtype)} tokens. "
            "It is truncated, or dtype is wrong."
        )
    if given is None:
        sample = np.frombuffer(read_at(path, 0, 1 << 14), dtype="<u2")
        # The upper half of a wider token is 0 to 3 for vocabularies up to 262,144.
        if len(sample) >= 64 and sample[1::2].max() < 4 <= sample[::2].max():
            raise SettingError(
                f"{path} looks like tokens of 32 or 64 bits: read as uint16, every second one of the first "
                f"{len(sample)} is below 4. Give dtype='uint32', or dtype='uint16' if that is right."
            )
    return _flat(path, dtype, count)
