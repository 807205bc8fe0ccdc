"""safetensors files: every tensor is a field; its first dimension is the rows."""

from __future__ import annotations

from pathlib import Path

from ....core.errors import SettingError, StorageError
from ....memory.disk.safetensors_header import HEADER_LIMIT, UnknownDtype, header_length, parse_header
from ...source import Field, FileSource, Shard, Strip
from ..paths import file_size, read_at


def safetensors_source(path: Path) -> FileSource:
    """The rows of one file, its tensors side by side in the order of their names. Reads the header only."""
    try:
        header = parse_header(lambda offset, count: read_at(path, offset, count), file_size(path))
    except UnknownDtype as error:
        raise SettingError(f"{path}: tensor {error}") from None
    except ValueError as error:
        raise StorageError(f"{path} is not a complete safetensors file ({error}). Copy or write it again.") from None
    fields, strips, counted = [], [], ("", 0)
    for name, entry in sorted(header.items()):
        if not entry.shape:
            raise SettingError(
                f"{path}: tensor {name!r} is a single number and has no rows. Save it with rows, or leave it out."
            )
        rows, *shape = entry.shape
        if counted[0] and rows != counted[1]:
            raise SettingError(
                f"{path}: tensor {counted[0]!r} has {counted[1]} rows, {name!r} has {rows}. The tensors of a file "
                "are the fields of its rows: their first dimensions must be equal."
            )
        counted = name, rows
        fields.append(Field(name=name, dtype=entry.dtype, shape=tuple(shape)))
        strips.append(Strip(path=path, offset=entry.start, stride=fields[-1].row_bytes))
    if not fields:
        raise SettingError(f"{path} holds no tensors. Name a file with at least one.")
    return FileSource(name=str(path), fields=tuple(fields), shards=(Shard(rows=counted[1], strips=tuple(strips)),))


def is_safetensors(path: Path, head: bytes) -> bool:
    """Whether a file that begins with ``head`` (16 bytes) looks like one."""
    return path.suffix == ".safetensors" or (len(head) > 8 and head[8:9] == b"{" and header_length(head) < HEADER_LIMIT)
