"""Law: whatever happened to a file, opening it gives strips that lie inside it, or an error of ours on one line."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormtorch import StormError
from stormtorch.data import open_source, tokens
from stormtorch.data.formats.open import Source
from stormtorch.data.source import FileSource

Case = tuple[Path, Callable[[], Source]]


def _npy(directory: Path) -> Case:
    np.save(directory / "a.npy", np.zeros(9, dtype=[("x", "<f4", (2,)), ("y", "u1")]))
    return directory / "a.npy", lambda: open_source([directory / "a.npy"])


def _safetensors(directory: Path) -> Case:
    header = json.dumps({"x": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}}).encode()
    (directory / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))
    return directory / "a.safetensors", lambda: open_source([directory / "a.safetensors"])


def _megatron(directory: Path) -> Case:
    np.arange(40, dtype=np.uint16).tofile(directory / "m.bin")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 2, 3)
    (directory / "m.idx").write_bytes(head + struct.pack("<2i2q3q", 30, 10, 0, 60, 0, 1, 2))
    return directory / "m.idx", lambda: tokens(directory / "m.bin", sequence=8)


def _llmc(directory: Path) -> Case:
    head = struct.pack("<3i", 20240520, 1, 40) + bytes(1012)
    (directory / "l.bin").write_bytes(head + np.arange(40, dtype=np.uint16).tobytes())
    return directory / "l.bin", lambda: tokens(directory / "l.bin", sequence=8)


def _packed(directory: Path) -> Case:
    index = {
        "format": "storm-data",
        "version": 1,
        "kind": "rows",
        "fields": [{"name": "x", "dtype": "float32", "shape": [2]}],
        "shards": [{"rows": 3, "files": [{"name": "0.bin", "bytes": 24, "crc32": "00"}]}],
    }
    (directory / "0.bin").write_bytes(bytes(24))
    (directory / "storm_data.json").write_text(json.dumps(index))
    return directory / "storm_data.json", lambda: open_source(directory)


def _arrow(directory: Path) -> Case:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"x": [[1, 2]] * 20, "y": range(20)})
    with pa.ipc.new_stream(directory / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=8)
    return directory / "a.arrow", lambda: open_source([directory / "a.arrow"])


@pytest.mark.parametrize("make", [_npy, _safetensors, _megatron, _llmc, _packed, _arrow])
def test_damage_never_leads_outside_the_file(tmp_path: Path, make: Callable[[Path], Case]) -> None:
    path, open_it = make(tmp_path)
    whole = path.read_bytes()
    reach = min(len(whole), 400)  # the headers; beyond them is payload, in which there is nothing to find

    @settings(max_examples=150, database=None)
    @given(
        changes=st.lists(st.tuples(st.integers(0, reach - 1), st.integers(0, 255)), max_size=4),
        cut=st.none() | st.integers(0, len(whole)),
    )
    def check(changes: list[tuple[int, int]], cut: int | None) -> None:
        data = bytearray(whole)
        for place, value in changes:
            data[place] = value
        path.write_bytes(data[:cut])
        try:
            source = open_it()
        except StormError as error:
            said = str(error)
        else:
            _check(source)
            return
        assert "\n" not in said

    check()


def _check(source: Source) -> None:
    assert isinstance(source, FileSource)
    for shard in source.shards:
        assert shard.rows > 0
        for strip, field in zip(shard.strips, source.fields, strict=True):
            end = strip.offset + (shard.rows - 1) * strip.stride + field.row_bytes
            assert 0 <= strip.offset < end <= strip.path.stat().st_size
