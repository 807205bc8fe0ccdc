"""The format, its reader and its writer. The bytes in ``test_golden_bytes`` are the format: they may never change."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stormtorch import SettingError, StorageError
from stormtorch.data import open_source, tokens
from stormtorch.data.formats.plain.packed import INDEX, verify
from stormtorch.data.packing.writer import PackWriter
from stormtorch.data.source import Field, FileSource

from ..forkserver import Popen
from .reading import read_all

X = Field(name="x", dtype=torch.float32, shape=(2,))
Y = Field(name="label/à", dtype=torch.int16, shape=())


def pack(out: Path, rows: int = 3, shard_bytes: int = 1 << 20) -> Path:
    with PackWriter(out, kind="rows", fields=[X, Y], shard_bytes=shard_bytes) as writer:
        writer.write({"x": torch.arange(2.0 * rows).view(rows, 2), Y.name: torch.arange(rows, dtype=torch.int16)})
    return out


def left_over(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("."))


def test_golden_bytes(tmp_path: Path) -> None:
    out = pack(tmp_path / "out", shard_bytes=20)
    assert {path.name: path.read_bytes().hex() for path in out.iterdir() if path.name != INDEX} == {
        "00000-0.bin": "000000000000803f0000004000004040",
        "00000-1.bin": "00000100",
        "00001-0.bin": "000080400000a040",
        "00001-1.bin": "0200",
    }
    assert json.loads((out / INDEX).read_text()) == {
        "format": "storm-data",
        "version": 1,
        "kind": "rows",
        "fields": [
            {"name": "x", "dtype": "float32", "shape": [2]},
            {"name": "label/à", "dtype": "int16", "shape": []},
        ],
        "shards": [
            {
                "rows": 2,
                "files": [
                    {"name": "00000-0.bin", "bytes": 16, "crc32": "25601b8b"},
                    {"name": "00000-1.bin", "bytes": 4, "crc32": "385fee5d"},
                ],
            },
            {
                "rows": 1,
                "files": [
                    {"name": "00001-0.bin", "bytes": 8, "crc32": "fbba6e81"},
                    {"name": "00001-1.bin", "bytes": 2, "crc32": "73ef707d"},
                ],
            },
        ],
    }


@settings(max_examples=25)
@given(pieces=st.lists(st.integers(0, 9), min_size=1, max_size=6), shard_bytes=st.integers(1, 90))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, pieces: list[int], shard_bytes: int) -> None:
    out = tmp_path_factory.mktemp("packed") / "out"
    rows = sum(pieces)
    x, y = torch.randn(rows, 2), torch.arange(rows, dtype=torch.int16)
    writer = PackWriter(out, kind="rows", fields=[X, Y], shard_bytes=shard_bytes)
    if rows == 0:
        with pytest.raises(SettingError, match="no rows"), writer:
            writer.write({"x": x, Y.name: y})
        assert not out.exists()
        return
    with writer:
        for part_x, part_y in zip(x.split(pieces), y.split(pieces), strict=True):
            writer.write({"x": part_x, Y.name: part_y})
    source = open_source(out)
    assert isinstance(source, FileSource)
    assert max(shard.rows for shard in source.shards) <= max(shard_bytes // 10, 1)
    found = read_all(source)
    assert torch.equal(found["x"], x)
    assert torch.equal(found[Y.name], y)
    verify(out)


def test_tokens_are_cut_into_windows_of_any_length(tmp_path: Path) -> None:
    fields = [Field(name="tokens", dtype=torch.uint16, shape=()), Field(name="loss_mask", dtype=torch.uint8, shape=())]
    with PackWriter(tmp_path / "t", kind="tokens", fields=fields, shard_bytes=60) as writer:
        writer.write({"tokens": torch.arange(50).to(torch.uint16), "loss_mask": torch.arange(50, dtype=torch.uint8)})
    found = read_all(tokens(tmp_path / "t", sequence=6))
    assert found["tokens"].tolist() == [list(range(s, s + 7)) for s in (0, 6, 12, 20, 26, 32, 40)]
    assert found["loss_mask"].tolist() == found["tokens"].tolist()
    assert tokens([tmp_path / "t", tmp_path / "t"], sequence=19).rows == 4
    with pytest.raises(SettingError, match="a row needs 101 tokens"):
        tokens(tmp_path / "t", sequence=100)
    with pytest.raises(SettingError, match=r"packed tokens.*sequence=2048"):
        open_source(tmp_path / "t")
    with pytest.raises(SettingError, match=r"kind 'rows' \(x float32 \(2\), .*not tokens"):
        tokens(pack(tmp_path / "rows"))


def _change(path: Path, change: Any) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index)
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: (p / "00000-0.bin").unlink(), ["00000-0.bin", "does not exist"]),
        (lambda p: (p / "00000-0.bin").write_bytes(bytes(23)), ["00000-0.bin has 23 bytes", "says 24", "3 rows"]),
        (lambda p: (p / INDEX).write_bytes(b"{"), ["damaged"]),
        (lambda p: (p / INDEX).write_bytes(b"\xff"), ["damaged"]),
        (lambda p: (p / INDEX).write_bytes(b"[]"), ["damaged", "format"]),
        (lambda p: _change(p, lambda i: i.update(version=2)), ["version 2", "reads 1", "Update STORM"]),
        (lambda p: _change(p, lambda i: i.update(kind="images")), ["kind is 'images'"]),
        (lambda p: _change(p, lambda i: i["fields"][0].update(dtype="float3")), ["KeyError: 'float3'"]),
        (lambda p: _change(p, lambda i: i["fields"][0].update(shape=[-2])), ["-2"]),
        (lambda p: _change(p, lambda i: i["shards"][0].update(rows=4)), ["shard 0 of 4 rows", "[32, 8]"]),
        (lambda p: _change(p, lambda i: i["shards"][0]["files"][0].update(name="../x")), ["'../x'"]),
        (lambda p: _change(p, lambda i: i.update(shards=[])), ["no rows"]),
        (lambda p: _change(p, lambda i: i.pop("fields")), ["'fields'"]),
    ],
)
def test_damaged_directories(tmp_path: Path, damage: Any, words: list[str]) -> None:
    out = pack(tmp_path / "out")
    damage(out)
    with pytest.raises(StorageError) as caught:
        open_source(out)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in [*words, str(out)]), caught.value


def test_verify_finds_a_changed_byte(tmp_path: Path) -> None:
    out = pack(tmp_path / "out")
    seen: list[int] = []
    verify(out, seen.append)
    assert sum(seen) == 30
    (out / "00000-1.bin").write_bytes(bytes(6))
    open_source(out)  # sizes are right: only reading everything can tell
    with pytest.raises(StorageError, match=rf"00000-1\.bin is damaged: checksum {zlib.crc32(bytes(6)):08x}"):
        verify(out)


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with PackWriter(tmp_path / "out", kind="rows", fields=[X], shard_bytes=8) as writer:
            writer.write({"x": torch.zeros(5, 2)})
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("stormtorch.data.packing.writer.os.fsync", full)
    with pytest.raises(StorageError, match=r"00000-0\.bin: no space is left .*24 bytes written"):
        pack(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_not_touched(tmp_path: Path) -> None:
    out = pack(tmp_path / "out")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(SettingError, match="exists already"):
        pack(out, rows=1)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert left_over(tmp_path) == []
    (tmp_path / "empty").mkdir()
    pack(tmp_path / "empty")  # an empty directory is as good as none


def test_two_writers_of_one_directory(tmp_path: Path) -> None:
    with PackWriter(tmp_path / "out", kind="rows", fields=[X], shard_bytes=8) as writer:
        with pytest.raises(SettingError, match="Another process is packing"):
            pack(tmp_path / "out")
        writer.write({"x": torch.zeros(5, 2)})
    assert read_all(open_source(tmp_path / "out"))["x"].shape == (5, 2)


def test_a_killed_writer_leaves_nothing_that_looks_like_data(tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from stormtorch.data.packing.writer import PackWriter\n"
        "from stormtorch.data.source import Field\n"
        "field = Field(name='x', dtype=torch.float32, shape=(2,))\n"
        "with PackWriter(Path(sys.argv[1]), kind='rows', fields=[field], shard_bytes=8000) as writer:\n"
        "    while True:\n"
        "        writer.write({'x': torch.zeros(100, 2)})\n"
    )
    child = Popen([sys.executable, "-c", code, str(tmp_path / "out")])
    partial = tmp_path / ".out.partial"
    deadline = time.monotonic() + 300
    while not (partial / "00003-0.bin").exists():
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not (tmp_path / "out").exists()
    assert left_over(tmp_path) == [".out.partial"]
    with pytest.raises(StorageError, match="does not exist"):
        open_source(tmp_path / "out")
    pack(tmp_path / "out")
    assert left_over(tmp_path) == []
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["00000-0.bin", "00000-1.bin", INDEX]
