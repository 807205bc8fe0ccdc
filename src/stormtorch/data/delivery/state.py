"""The state of a loader, as plain numbers and strings that any checkpoint format can hold.

A state recognises its data by hashes of its layout and of its content. They contain neither paths nor times, because
states and data move between machines. Of the content, a source of at most 4 MiB is read whole; of a larger one 256
rows, evenly spread from the first to the last, and at most 8 KiB of each field. So the hash detects other data of the
same form, but not a change to a few rows of many. A file that was truncated gives fewer bytes; reading its rows reports
that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.errors import SettingError
from ...core.sizes import KiB, MiB
from ..formats.items import ItemSource
from ..formats.paths import file_size, read_at
from ..readers.layout import Layout
from ..source import DecodedSource, FileSource, RowSource

VERSION = 2
_PLACE = {"version", "epoch", "batch", "run_epoch"}
_MEANING = {
    "data": "other data: its rows, shards or fields differ",
    "rows": "another number of rows",
    "content": "other data of the same form: samples of its rows differ",
}
_OPTIONAL = {"content"}  # older states do not have it
_SMALL_BYTES = 4 * MiB
_SAMPLES = 256
_PIECE_BYTES = 4 * KiB


def fingerprint(source: RowSource) -> str:
    """A hash of the layout of the data, by which a state recognises its data."""
    text = repr((list(source.groups), [(field.name, str(field.dtype), list(field.shape)) for field in source.fields]))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def check_state(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise SettingError for a state of another order, which does not determine the next batch."""
    if not isinstance(state, Mapping) or not state.keys() >= _PLACE:
        raise SettingError("This is not a state of a DataLoader. Give what its state_dict() returned.")
    if not all(isinstance(state[name], int) for name in _PLACE):
        raise SettingError("The DataLoader's state is damaged: its place is not a number. Start without a state.")
    if state["version"] != VERSION:
        raise SettingError(f"The state has version {state['version']!r}, this STORM reads version {VERSION}.")
    for name, value in expected.items():
        found = state.get(name)
        if found is None and name in _OPTIONAL:
            continue
        if not isinstance(found, bool | int | str) or found != value:
            if not isinstance(found, bool | int | str | None):
                found = type(found).__name__
            meaning = _MEANING.get(name, f"{name}={found!r}, this loader has {name}={value!r}")
            raise SettingError(f"The state belongs to {meaning}. Make the loader as it was, or start without a state.")


def content_of(source: FileSource | DecodedSource | ItemSource) -> str:
    """The hash. Blocks while it reads samples; raises StorageError. Reads no items of a torch Dataset."""
    found = hashlib.blake2b(digest_size=8)
    for piece in _samples(source):
        found.update(piece)
    return found.hexdigest()


def _samples(source: FileSource | DecodedSource | ItemSource) -> Iterator[bytes]:
    if isinstance(source, FileSource):
        return _of_rows(source)
    if isinstance(source, ItemSource):
        return iter((str(source.rows).encode(),))
    return _of_files(source.files()) if source.files() else _of_tables(source)


def _spread(count: int, most: int) -> list[int]:
    """At most ``most`` of ``count`` numbers, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [number * (count - 1) // (most - 1) for number in range(most)]


def _of_rows(source: FileSource) -> Iterator[bytes]:
    strips = [(shard.rows, *pair) for shard in source.shards for pair in zip(shard.strips, source.fields, strict=True)]
    spans = [(rows - 1) * strip.stride + field.row_bytes if rows else 0 for rows, strip, field in strips]
    if sum(spans) <= _SMALL_BYTES:
        for span, (rows, strip, field) in zip(spans, strips, strict=True):
            data = read_at(strip.path, strip.offset, span)
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
                yield read_at(path, begin, field.row_bytes)
            else:
                yield read_at(path, begin, _PIECE_BYTES)
                yield read_at(path, end - _PIECE_BYTES, _PIECE_BYTES)


def _of_files(paths: Sequence[Path]) -> Iterator[bytes]:
    for path in (paths[number] for number in _spread(len(paths), _SAMPLES)):
        size = file_size(path)
        yield str(size).encode()
        places = _spread(max(size // _PIECE_BYTES, 1), max(_SAMPLES // len(paths), 4))
        for at in (*(place * _PIECE_BYTES for place in places), max(size - _PIECE_BYTES, 0)):
            yield read_at(path, at, _PIECE_BYTES)


def _of_tables(source: DecodedSource) -> Iterator[bytes]:
    for group in _spread(len(source.groups), 16):
        rows = source.decode(group)
        for field in source.fields:
            tensor = rows[field.name]
            chosen = tensor[_spread(len(tensor), _SAMPLES // 16)].contiguous()
            yield np.asarray(chosen.view(-1).view(torch.uint8)).tobytes()
