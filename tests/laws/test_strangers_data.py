"""Law: data from a stranger is read within its folder or refused in one line; and a state knows the data it is of."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stormtorch import DataLoader, SettingError
from stormtorch.cli.main import main
from stormtorch.data import raw, tokens
from stormtorch.data.packing.writer import PackWriter
from stormtorch.data.source import Field
from stormtorch.training.text import input_bytes, prepare
from stormtorch.training.text.packed import Packed

from .strangers import DEEP, Outside, pickled, refused, sparse, untouched

Spoil = Callable[[Path, Outside], object]


def pack(folder: Path) -> Path:
    fields = [Field(name="x", dtype=torch.int64, shape=(2,)), Field(name="y", dtype=torch.int32, shape=())]
    with PackWriter(folder, kind="rows", fields=fields, shard_bytes=1 << 20) as writer:
        writer.write({"x": torch.arange(16).view(8, 2), "y": torch.arange(8, dtype=torch.int32)})
    return folder


def read_all(what: object) -> list[Any]:
    with DataLoader(what, batch_size=2) as loader:
        return list(loader)


def index(edit: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(folder: Path, outside: Outside) -> None:
        path = folder / "storm_data.json"
        content = json.loads(path.read_text())
        edit(content)
        path.write_text(json.dumps(content).replace("OUTSIDE", str(outside.folder)))

    return spoil


def text(content: str) -> Spoil:
    return lambda folder, _: (folder / "storm_data.json").write_text(content)


def named(name: object) -> Spoil:
    return index(lambda i: i["shards"][0]["files"][0].update(name=name))


def elsewhere(name: str) -> Spoil:
    def spoil(folder: Path, outside: Outside) -> None:
        shutil.move(folder / name, outside.folder / "theirs")
        (folder / name).symlink_to(outside.folder / "theirs")

    return spoil


def _first(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["shards"][0]
    return found


def _pipe(folder: Path, _: Outside) -> None:
    (folder / "00000-0.bin").unlink()
    os.mkfifo(folder / "00000-0.bin")


PACKED: dict[str, Spoil] = {
    "up": named("../outside/thesis.txt"),
    "from the root": named("OUTSIDE/thesis.txt"),
    "the folder": named("."),
    "the folder above": named(".."),
    "no name": named(""),
    "a number": named(5),
    "a NUL": named("a\0b"),
    "half a character": named("\ud800"),
    "a long name": named("a" * 5000),
    "a link of a shard": elsewhere("00000-0.bin"),
    "a link of the index": elsewhere("storm_data.json"),
    "a pipe": _pipe,
    "no JSON": text("{"),
    "deep": text(DEEP),
    "a list": text("[]"),
    "not UTF-8": lambda folder, _: (folder / "storm_data.json").write_bytes(b'{"a": "\xff"}'),
    "sparse": lambda folder, _: sparse(folder / "storm_data.json"),
    "another format": index(lambda i: i.update(format="pickle")),
    "a version to come": index(lambda i: i.update(version=99)),
    "another kind": index(lambda i: i.update(kind="code")),
    "a kind that is a list": index(lambda i: i.update(kind=["rows"])),
    "no fields": index(lambda i: i.update(fields=[])),
    "fields as words": index(lambda i: i.update(fields="xy")),
    "an unknown dtype": index(lambda i: i["fields"][0].update(dtype="object")),
    "a dtype that is a list": index(lambda i: i["fields"][0].update(dtype=[])),
    "a negative shape": index(lambda i: i["fields"][0].update(shape=[-2])),
    "a huge shape": index(lambda i: i["fields"][0].update(shape=[1 << 62, 1 << 62])),
    "a shape of 400 digits": index(lambda i: i["fields"][0].update(shape=[10**400])),
    "rows of nothing": index(lambda i: (i["fields"][0].update(shape=[0]), _first(i)["files"][0].update(bytes=0))),
    "one name twice": index(lambda i: i["fields"][1].update(name=i["fields"][0]["name"])),
    "negative rows": index(lambda i: _first(i).update(rows=-8)),
    "rows as truth": index(lambda i: _first(i).update(rows=True)),
    "rows as a fraction": index(lambda i: _first(i).update(rows=8.0)),
    "too many rows": index(lambda i: _first(i).update(rows=1 << 62)),
    "an infinite size": index(lambda i: _first(i)["files"][0].update(bytes=float("inf"))),
    "a sum that is none": index(lambda i: _first(i)["files"][0].update(crc32="xyz")),
    "too few files": index(lambda i: _first(i)["files"].pop()),
    "shards as a number": index(lambda i: i.update(shards=3)),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    outside = Outside(tmp_path / "outside")
    folder = pack(tmp_path / "packed")
    PACKED[name](folder, outside)
    with untouched(outside):
        refused(lambda: read_all(folder))
        refused(lambda: tokens(folder, sequence=4))
        if name != "rows of nothing":  # whose sums are right
            assert main(["data", "verify", str(folder)]) == 1
    assert len(capsys.readouterr().err.splitlines()) <= 1


def test_tokens_have_no_shape(tmp_path: Path) -> None:
    """Else a file of no bytes would hold as many tokens as it liked."""
    with PackWriter(
        tmp_path / "packed", kind="tokens", fields=[Field(name="tokens", dtype=torch.int32, shape=())], shard_bytes=99
    ) as writer:
        writer.write({"tokens": torch.arange(8, dtype=torch.int32)})
    index(lambda i: i["fields"][0].update(shape=[2]))(tmp_path / "packed", Outside(tmp_path / "outside"))
    refused(lambda: tokens(tmp_path / "packed", sequence=2), "storm_data.json")


def pack_to_train_on(folder: Path, kind: str) -> Path:
    """A folder that ``storm train --data`` takes, in the form of ``kind``: two columns, one shard."""
    names, shape = {"rows": (("input_ids", "labels"), (4,)), "tokens": (("tokens", "loss_mask"), ())}[kind]
    fields = [
        Field(name=name, dtype=dtype, shape=shape) for name, dtype in zip(names, (torch.int16, torch.int8), strict=True)
    ]
    with PackWriter(folder, kind=kind, fields=fields, shard_bytes=1 << 20) as writer:  # type: ignore[arg-type]
        writer.write({field.name: torch.arange(1, 9, dtype=field.dtype).view(-1, *shape) for field in fields})
    return folder


TO_TRAIN_ON: dict[str, Spoil] = PACKED | {
    "no tokens": index(lambda i: i["fields"][0].update(name="x")),
    "tokens with a fraction": index(lambda i: i["fields"][0].update(dtype="float16")),
    "tokens of a type that numpy lacks": index(lambda i: i["fields"][0].update(dtype="bfloat16")),
    "a second column of a type that numpy lacks": index(lambda i: i["fields"][1].update(dtype="float8_e5m2")),
    "other tokens": lambda folder, _: (folder / "00000-0.bin").write_bytes(b"\x02\0" * 8),
    "negative tokens": lambda folder, _: (folder / "00000-0.bin").write_bytes(b"\xff" * 16),
    "another second column": lambda folder, _: (folder / "00000-1.bin").write_bytes(b"\x02" * 8),
    "a sum of another file": index(lambda i: _first(i)["files"][0].update(crc32="1")),
    "a negative sum": index(lambda i: _first(i)["files"][0].update(crc32="-1")),
}


@pytest.mark.parametrize("kind", ["rows", "tokens"])
@pytest.mark.parametrize("name", TO_TRAIN_ON)
def test_packed_folders_to_train_on(tmp_path: Path, name: str, kind: str) -> None:
    outside = Outside(tmp_path / "outside")
    folder = pack_to_train_on(tmp_path / "packed", kind)

    def train_on_it() -> object:
        input_bytes([folder])  # what a run shows its way by
        return prepare([folder], None, sequence=4, cache=tmp_path / "cache", vocabulary=100)

    train_on_it()
    shutil.rmtree(tmp_path / "cache")
    TO_TRAIN_ON[name](folder, outside)
    with untouched(outside):
        refused(train_on_it)
    cache = tmp_path / "cache"
    assert not cache.exists() or not [path for path in cache.iterdir() if path.is_dir()]


@pytest.mark.parametrize("kind", ["a link", "a pipe"])
def test_a_shard_that_is_exchanged_after_it_was_examined(tmp_path: Path, kind: str) -> None:
    outside = Outside(tmp_path / "outside")
    folder = pack_to_train_on(tmp_path / "packed", "tokens")
    spoil = {"a link": elsewhere("00000-0.bin"), "a pipe": _pipe}[kind]
    source = Packed([folder], sequence=4, padding=0, vocabulary=None, completions_only=None)
    spoil(folder, outside)
    with untouched(outside):
        refused(lambda: list(source.encoded(None)), "00000-0.bin")


@pytest.mark.parametrize("kind", ["half a folder", "a folder", "a name"])
def test_packing_where_a_stranger_was(tmp_path: Path, kind: str) -> None:
    outside = Outside(tmp_path / "outside")
    place = {"half a folder": ".packed.partial", "a folder": "packed", "a name": "packed"}[kind]
    (tmp_path / place).symlink_to(outside.folder if kind != "a name" else outside.folder / "new")
    with untouched(outside):
        refused(lambda: pack(tmp_path / "packed"))


def npy(header: str, data: bytes = bytes(64), *, version: bytes = b"\1\0") -> bytes:
    body = header.encode() + b"\n"
    return b"\x93NUMPY" + version + len(body).to_bytes(2 if version == b"\1\0" else 4, "little") + body + data


def array(shape: str = "(8,)", descr: str = "'<i8'") -> bytes:
    return npy(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}")


def _objects() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{}, []], dtype=object), allow_pickle=True)
    return file.getvalue()


FILES: dict[str, bytes | Callable[[Outside], bytes]] = {
    "npy: objects": _objects(),
    "npy: a pickle behind": lambda outside: array(descr="'|O'") + pickled(outside),
    "npy: an expression": npy("{'descr': __import__('os').getcwd(), 'fortran_order': False, 'shape': (8,)}"),
    "npy: a deep expression": npy("-" * 9000 + "1"),
    "npy: brackets": npy("(" * 9000),
    "npy: a negative shape": array("(-8,)"),
    "npy: a huge shape": array("(4611686018427387904, 4)"),
    "npy: a shape of 400 digits": array(f"({10**400},)"),
    "npy: rows of nothing": array("(8, 0)"),
    "npy: a shape of words": array("('a',)"),
    "npy: a wide type": array(descr="'|V9999999999999'"),
    "npy: a type of lists": array(descr="[('a', [('b', '<i8')], (-1,))]"),
    "npy: a type with a title": array(descr="[(('a', 'b'), '<i8', 10000000000)]"),
    "npy: no header": b"\x93NUMPY\1\0",
    "npy: a long header": npy("{}", version=b"\2\0") + bytes(16),
    "npy: a header of 4 GiB": b"\x93NUMPY\2\0\xff\xff\xff\xff{}",
    "npy: another version": npy("{}", version=b"\x09\0"),
    "Arrow: text": b"ARROW1\0\0 and no more than that",
    "Arrow: a stream of nothing": b"\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(64),
    "Arrow: a long message": b"\xff\xff\xff\xff\x10\0\0\0" + b"\xff" * 64,
    "Parquet: text": b"PAR1 and no more than that PAR1",
    "Parquet: a long footer": b"PAR1" + bytes(64) + b"\xff\xff\xff\x7fPAR1",
    "Parquet: a footer of ones": b"PAR1" + b"\xff" * 64 + b"\x40\0\0\0PAR1",
    "a zip": b"PK\x03\x04" + bytes(64),
    "a pickle": pickled,
    "nothing": b"",
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_rows(tmp_path: Path, name: str) -> None:
    pytest.importorskip("pyarrow")
    outside = Outside(tmp_path / "outside")
    file, content = tmp_path / "rows.dat", FILES[name]
    file.write_bytes(content if isinstance(content, bytes) else content(outside))
    with untouched(outside):
        refused(lambda: read_all(file), "rows.dat")


def megatron(sequences: int = 1, documents: int = 1, code: int = 8, rest: bytes = bytes(20)) -> bytes:
    return struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, sequences, documents) + rest


INDEXES: dict[str, bytes] = {
    "text": b"hello",
    "no dtype": megatron(code=77),
    "too many sequences": megatron(sequences=(1 << 64) - 1),
    "too many documents": megatron(documents=(1 << 64) - 1),
    "a negative length": megatron(rest=struct.pack("<iqq", -4, 0, 0)),
    "beyond the file": megatron(rest=struct.pack("<iqq", 4, 1 << 62, 0)),
}


@pytest.mark.parametrize("name", INDEXES)
def test_indexes_of_tokens(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(64))
    (tmp_path / "a.idx").write_bytes(INDEXES[name])
    refused(lambda: tokens(tmp_path / "a.bin", sequence=4))


SAVED: dict[str, str] = {
    "up": '{"_data_files": [{"filename": "../outside/thesis.txt"}]}',
    "from the root": '{"_data_files": [{"filename": "OUTSIDE/thesis.txt"}]}',
    "a link": '{"_data_files": [{"filename": "linked.arrow"}]}',
    "a number": '{"_data_files": [{"filename": 5}]}',
    "a NUL": '{"_data_files": [{"filename": "a\\u0000"}]}',
    "no files": '{"_data_files": []}',
    "files as a number": '{"_data_files": 5}',
    "columns as numbers": '{"_data_files": [{"filename": "a.arrow"}], "_format_columns": [1]}',
    "no JSON": "{",
    "deep": DEEP,
    "a list": "[]",
}


@pytest.mark.parametrize("name", SAVED)
def test_folders_that_datasets_saved(tmp_path: Path, name: str) -> None:
    outside = Outside(tmp_path / "outside")
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "linked.arrow").symlink_to(outside.file)
    (folder / "state.json").write_text(SAVED[name].replace("OUTSIDE", str(outside.folder)))
    with untouched(outside):
        refused(lambda: read_all(folder))


# A state knows its data


def rows(folder: Path, seed: int, count: int = 64, width: int = 4) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "rows.npy"
    np.save(path, np.random.default_rng(seed).integers(0, 1 << 30, (count, width)))
    return path


def _parquet(folder: Path, seed: int) -> object:
    arrow = pytest.importorskip("pyarrow")
    numbers = np.load(rows(folder, seed))[:, 0]
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"x": numbers}), folder / "rows.parquet", row_group_size=16)
    return folder / "rows.parquet"


def _table(folder: Path, seed: int) -> object:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": np.load(rows(folder, seed))[:, 0].tolist()})


def _packed(folder: Path, seed: int) -> object:
    field = Field(name="x", dtype=torch.int64, shape=(4,))
    with PackWriter(folder / "packed", kind="rows", fields=[field], shard_bytes=512) as writer:
        writer.write({"x": torch.from_numpy(np.load(rows(folder, seed)))})
    return folder / "packed"


def _tokens(folder: Path, seed: int) -> object:
    np.load(rows(folder, seed)).astype("<u2").tofile(folder / "a.bin")
    return tokens(folder / "a.bin", sequence=8, extra=1)


def _records(folder: Path, seed: int) -> object:
    made = np.zeros(64, dtype=[("x", "<i8"), ("y", "<i4")])
    made["x"] = np.load(rows(folder, seed))[:, 0]
    made.tofile(folder / "a.raw")
    return raw(folder / "a.raw", dtype=made.dtype)


SOURCES: dict[str, Callable[[Path, int], object]] = {
    "npy": rows,
    "large": lambda folder, seed: rows(folder, seed, count=3000, width=600),
    "wide rows": lambda folder, seed: rows(folder, seed, count=12, width=70_000),
    "packed": _packed,
    "tokens": _tokens,
    "records": _records,
    "parquet": _parquet,
    "table": _table,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_state_knows_its_data(tmp_path: Path, kind: str) -> None:
    """Copied, moved and touched it is the same; of the same form with other numbers it is not."""
    make = SOURCES[kind]
    with (
        DataLoader(make(tmp_path / "a", 1), 2, shuffle=True) as one,
        DataLoader(make(tmp_path / "copy", 1), 2, shuffle=True) as copy,
        DataLoader(make(tmp_path / "b", 2), 2, shuffle=True) as other,
    ):
        batches = iter(one)
        next(batches)
        state = json.loads(json.dumps(one.state_dict()))
        with pytest.raises(SettingError, match="other data of the same form"):
            other.load_state_dict(state)
        copy.load_state_dict(state)
        torch.testing.assert_close(next(batches), next(iter(copy)), rtol=0, atol=0)
        old = {name: value for name, value in state.items() if name != "content"}  # as older versions wrote it
        other.load_state_dict(old)


def test_one_number_of_a_small_dataset_is_noticed(tmp_path: Path) -> None:
    path = rows(tmp_path, 1, count=1000)
    with DataLoader(path, 2) as loader:
        state = loader.state_dict()
    changed = np.load(path)
    changed[517, 2] += 1
    np.save(path, changed)
    with DataLoader(path, 2) as loader, pytest.raises(SettingError, match="other data"):
        loader.load_state_dict(state)


def test_a_file_that_is_gone_is_said(tmp_path: Path) -> None:
    path = rows(tmp_path, 1)
    with DataLoader(path, 2) as loader:
        path.unlink()
        refused(loader.state_dict, str(path))


STATES: dict[str, Any] = {
    "no dict": [1],
    "empty": {},
    "an epoch that is a word": {"epoch": "one"},
    "an infinite batch": {"batch": float("inf")},
    "a tensor": {"batch": torch.zeros(3)},
    "a version that is a tensor": {"version": torch.zeros(3)},
    "a seed that is a tensor": {"seed": torch.zeros(3)},
    "data that is a list": {"data": [1]},
    "content that is a tensor": {"content": torch.zeros(3)},
    "a batch far on": {"batch": 10**30},
    "a negative epoch": {"epoch": -1},
}


@pytest.mark.parametrize("name", STATES)
def test_states(tmp_path: Path, name: str) -> None:
    with DataLoader(rows(tmp_path, 1), 2) as loader:
        given = STATES[name]
        state = {**loader.state_dict(), **given} if isinstance(given, dict) and given else given
        refused(lambda: loader.load_state_dict(state))
