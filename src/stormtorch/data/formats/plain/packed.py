"""STORM's packed format: a directory of plain files, and one index that describes them.

``docs/data_format.md`` is the specification. Each shard has one file for each column, without a header: every column
begins on a page, direct I/O reads it without waste, and other tools can read it too. The writer names the directory
after everything is on the disk, so a directory with its name is complete.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ....core.errors import SettingError, StorageError
from ....memory.disk.calls import storage_errors
from ....memory.disk.contained import inside, parse_json, read_small
from ...source import Field, FileSource, Shard, Strip
from ..columns import describe
from ..dtypes import BY_NAME, name_of
from ..paths import file_size

INDEX = "storm_data.json"
FORMAT, VERSION = "storm-data", 1
Kind = Literal["rows", "tokens"]


@dataclass(frozen=True, kw_only=True)
class PackedFile:
    """One column of one shard. ``crc32``: of the whole file."""

    name: str
    bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class PackedShard:
    """``rows`` rows (or tokens), with one file for each field of the index."""

    rows: int
    files: tuple[PackedFile, ...]


@dataclass(frozen=True, kw_only=True)
class Index:
    """The content of ``storm_data.json``. A field of tokens has the shape of one token: ``()``."""

    kind: Kind
    fields: tuple[Field, ...]
    shards: tuple[PackedShard, ...]


def is_packed(path: Path) -> bool:
    return (path / INDEX).is_file()


def read_index(directory: Path) -> Index:
    """The index of a packed directory. Checks that every file exists with its size. Reads no data."""
    place = inside(directory, INDEX)
    index = _parse(place, read_small(place))
    for shard in index.shards:
        for file in shard.files:
            size = file_size(inside(directory, file.name))
            if size != file.bytes:
                raise StorageError(
                    f"{directory / file.name} has {size} bytes, the index says {file.bytes} ({shard.rows} rows). "
                    "It is truncated or was changed: copy or pack it again."
                )
    return index


def packed_source(directory: Path, kind: Kind) -> FileSource:
    """The source of a packed directory of that kind. Of the kind tokens, each token is a row."""
    index = read_index(directory)
    if index.kind != kind:
        if kind == "rows":
            raise SettingError(
                f"{directory} holds packed tokens. Give the length of a row: tokens({str(directory)!r}, sequence=2048)."
            )
        raise SettingError(
            f"{directory} is packed data of kind {index.kind!r} ({describe(index.fields)}), not tokens. "
            "Give the path itself to the loader."
        )
    shards = []
    for shard in index.shards:
        columns = zip(shard.files, index.fields, strict=True)
        strips = (Strip(path=directory / file.name, offset=0, stride=field.row_bytes) for file, field in columns)
        shards.append(Shard(rows=shard.rows, strips=tuple(strips)))
    return FileSource(name=str(directory), fields=index.fields, shards=tuple(shards))


def verify(directory: Path, progress: Callable[[int], None] = lambda _: None) -> None:
    """Read every file and compare its checksum; raises StorageError at the first that differs. Blocks.

    Calls ``progress`` with the bytes of each piece.
    """
    for shard in read_index(directory).shards:
        for file in shard.files:
            found = 0
            path = directory / file.name
            with storage_errors(f"read {path}"), path.open("rb", buffering=0) as opened:
                while piece := opened.read(1 << 22):
                    found = zlib.crc32(piece, found)
                    progress(len(piece))
            if found != file.crc32:
                raise StorageError(
                    f"{directory / file.name} is damaged: checksum {found:08x}, the index says {file.crc32:08x}. "
                    "Copy or pack it again."
                )


def to_json(index: Index, made_with: dict[str, object]) -> str:
    """The text of ``storm_data.json``. ``made_with`` is for people; no code reads it."""
    fields = [{"name": f.name, "dtype": name_of(f.dtype), "shape": list(f.shape)} for f in index.fields]
    shards = [
        {
            "rows": shard.rows,
            "files": [{"name": f.name, "bytes": f.bytes, "crc32": f"{f.crc32:08x}"} for f in shard.files],
        }
        for shard in index.shards
    ]
    whole = {"format": FORMAT, "version": VERSION, "kind": index.kind, "fields": fields, "shards": shards}
    return json.dumps(whole | ({"made_with": made_with} if made_with else {}), indent=1) + "\n"


def _parse(place: Path, text: bytes) -> Index:
    try:
        found: Any = parse_json(text)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise _damaged(place, f"format is not {FORMAT!r}")
        if found["version"] != VERSION:
            raise StorageError(
                f"{place} has version {found['version']}, this STORM reads {VERSION}. Update STORM, or pack again."
            )
        if found["kind"] not in get_args(Kind):
            raise _damaged(place, f"kind is {found['kind']!r}")
        fields = tuple(
            Field(name=str(f["name"]), dtype=BY_NAME[f["dtype"]], shape=tuple(_count(n) for n in f["shape"]))
            for f in found["fields"]
        )
        shards = tuple(
            PackedShard(
                rows=_count(shard["rows"]),
                files=tuple(
                    PackedFile(name=str(f["name"]), bytes=_count(f["bytes"]), crc32=int(f["crc32"], 16))
                    for f in shard["files"]
                ),
            )
            for shard in found["shards"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(place, f"{type(error).__name__}: {str(error)[:200]}") from error
    if len({field.name for field in fields}) < len(fields):
        raise _damaged(place, "two fields have one name")
    if found["kind"] == "tokens" and any(field.shape for field in fields):
        raise _damaged(place, "tokens have no shape")
    for number, shard in enumerate(shards):
        expected = [shard.rows * math.prod(field.shape) * field.dtype.itemsize for field in fields]
        if [file.bytes for file in shard.files] != expected:
            raise _damaged(place, f"shard {number} of {shard.rows} rows needs files of {expected} bytes")
    if not fields or not sum(shard.rows for shard in shards):
        raise _damaged(place, "it lists no rows")
    return Index(kind=found["kind"], fields=fields, shards=shards)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value


def _damaged(place: Path, why: str) -> StorageError:
    return StorageError(f"{place} is damaged ({why}). Copy or pack it again.")
