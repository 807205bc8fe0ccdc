"""Combines sources: shards one after another, fields side by side.

Fields from different files may be divided into shards at different rows. ``side_by_side`` cuts all fields where any of
them is cut, so that each shard of the result has one strip for each field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...core.errors import SettingError
from ..source import Field, FileSource, Shard, Strip
from .dtypes import name_of


def one_after_another(name: str, sources: Sequence[FileSource]) -> FileSource:
    """All rows of ``sources`` in order. Their fields must be equal; skips sources without rows."""
    first = sources[0]
    for other in sources[1:]:
        check_equal_fields(first.name, first.fields, other.name, other.fields)
    shards = tuple(shard for source in sources for shard in source.shards if shard.rows)
    if not shards:
        raise SettingError(f"{name} has no rows (files read: {len(sources)}). Give data with at least one row.")
    return FileSource(name=name, fields=first.fields, shards=shards)


def side_by_side(name: str, sources: Mapping[str, FileSource]) -> FileSource:
    """One field from each source, named by its key. All must have one field, and the same number of rows."""
    for key, source in sources.items():
        if len(source.fields) != 1:
            raise SettingError(
                f"{name}: {key!r} names {source.name}, which has {len(source.fields)} fields "
                f"({', '.join(field.name for field in source.fields)}). Name a source of one field."
            )
    (first, reference), *others = sources.items()
    for key, source in others:
        if source.rows != reference.rows:
            raise SettingError(
                f"{name}: field {first!r} has {reference.rows} rows ({reference.name}), field {key!r} has "
                f"{source.rows} ({source.name}). Fields are aligned by row: give files with equal numbers of rows."
            )
    fields = tuple(replace(source.fields[0], name=key) for key, source in sources.items())
    columns = [[(shard.rows, shard.strips[0]) for shard in source.shards] for source in sources.values()]
    return FileSource(name=name, fields=fields, shards=tuple(cut_together(columns)))


def choose(source: FileSource, names: Sequence[str] | None) -> FileSource:
    """The same rows with only the fields ``names``, in that order; None: all."""
    present = [field.name for field in source.fields]
    at = [present.index(name) for name in selected(source.name, "fields", present, names)]
    shards = tuple(replace(shard, strips=tuple(shard.strips[number] for number in at)) for shard in source.shards)
    return FileSource(name=source.name, fields=tuple(source.fields[number] for number in at), shards=shards)


def selected(where: str, kind: str, present: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    """Those of the fields or columns (``kind``) in ``present`` that are ``wanted``, in that order; None: all."""
    chosen = list(present if wanted is None else wanted)
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(present):
        raise SettingError(
            f"{where} has {kind} {', '.join(present) or '(none)'}; asked for {', '.join(chosen) or 'none'}. "
            "Name some of them, each once."
        )
    return chosen


def check_equal_fields(first: str, expected: Sequence[Field], other: str, found: Sequence[Field]) -> None:
    """Raise SettingError unless both have the same names, dtypes and shapes in the same order."""
    if tuple(expected) != tuple(found):
        raise SettingError(
            f"{first} has rows of {describe(expected)}, {other} has {describe(found)}. "
            "Shards must agree in names, dtypes and row shapes."
        )


def describe(fields: Sequence[Field]) -> str:
    """Fields as text: ``x float32 (3072), y int64``."""
    return ", ".join(
        f"{field.name} {name_of(field.dtype)}{' (' + ', '.join(map(str, field.shape)) + ')' if field.shape else ''}"
        for field in fields
    )


def cut_together(columns: list[list[tuple[int, Strip]]]) -> list[Shard]:
    shards = []
    at = [0] * len(columns)  # the current strip of each column
    used = [0] * len(columns)  # its rows that are in shards already
    while at[0] < len(columns[0]):
        pieces = [column[index] for column, index in zip(columns, at, strict=True)]
        rows = min(piece[0] - done for piece, done in zip(pieces, used, strict=True))
        strips = tuple(
            replace(strip, offset=strip.offset + done * strip.stride)
            for (_, strip), done in zip(pieces, used, strict=True)
        )
        shards.append(Shard(rows=rows, strips=strips))
        for number, (length, _) in enumerate(pieces):
            used[number] += rows
            if used[number] == length:
                at[number], used[number] = at[number] + 1, 0
    return shards
