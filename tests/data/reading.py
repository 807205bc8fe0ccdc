"""Reads a source the slow, plain way: what the loader must give too."""

from __future__ import annotations

import torch
from torch import Tensor

from stormtorch.data.formats.open import Source
from stormtorch.data.source import DecodedSource, FileSource


def read_all(source: Source) -> dict[str, Tensor]:
    """Every row of every field, in order."""
    if isinstance(source, DecodedSource):
        parts = [source.decode(group) for group in range(len(source.groups))]
        return {field.name: torch.cat([part[field.name] for part in parts]) for field in source.fields}
    assert isinstance(source, FileSource)
    found = {}
    for number, field in enumerate(source.fields):
        rows = []
        for shard in source.shards:
            strip = shard.strips[number]
            with strip.path.open("rb") as file:
                for row in range(shard.rows):
                    file.seek(strip.offset + row * strip.stride)
                    data = file.read(field.row_bytes)
                    assert len(data) == field.row_bytes, f"{strip.path} ends in row {row}"
                    rows.append(torch.frombuffer(bytearray(data), dtype=field.dtype).view(field.shape))
        found[field.name] = torch.stack(rows)
    return found


def the_field(source: Source) -> Tensor:
    """The rows of a source of one field."""
    (rows,) = read_all(source).values()
    return rows
