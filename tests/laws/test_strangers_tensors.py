"""Law: files of tensors from a stranger, and the indexes that name them, are read whole or refused in one line.

Every header goes to all readers that we have: of weights, of data, and of a base model under adapters."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch import DataLoader
from stormtorch.checkpoint import load_weights
from stormtorch.training.model import hf_model

from .strangers import DEEP, Outside, refused, sparse, tensor_file, untouched

WEIGHT: dict[str, Any] = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
DATA = bytes(64)


def entry(**changes: Any) -> bytes:
    return tensor_file({"weight": {**WEIGHT, **changes}}, DATA)


def without(key: str) -> bytes:
    return tensor_file({"weight": {name: value for name, value in WEIGHT.items() if name != key}}, DATA)


HEADERS: dict[str, bytes] = {
    "no bytes": b"",
    "seven bytes": bytes(7),
    "a length of 2^62": tensor_file({}, DATA, length=1 << 62),
    "a length of 2^63": tensor_file({}, DATA, length=1 << 63),
    "a length of 2^64-1": tensor_file({}, DATA, length=(1 << 64) - 1),
    "a length of zero": tensor_file(b"", DATA),
    "a length of one": tensor_file(b"{", DATA),
    "a length beyond the file": tensor_file({"weight": WEIGHT}, DATA, length=4096),
    "no JSON": tensor_file(b"{not JSON}", DATA),
    "no UTF-8": tensor_file(b'{"\xff\xfe": 1}', DATA),
    "a list": tensor_file([WEIGHT], DATA),
    "a number": tensor_file(12345678, DATA),
    "null": tensor_file(None, DATA),
    "nested deeply": tensor_file(DEEP.encode(), DATA),
    "objects nested deeply": tensor_file(b'{"a":' * 100_000, DATA),
    "a name twice": tensor_file(
        b'{"weight":' + json.dumps(WEIGHT).encode() + b',"weight":' + json.dumps(WEIGHT).encode() + b"}", DATA
    ),
    "an entry that is a list": tensor_file({"weight": [1, 2]}, DATA),
    "an entry that is null": tensor_file({"weight": None}, DATA),
    "no dtype": without("dtype"),
    "no shape": without("shape"),
    "no offsets": without("data_offsets"),
    "an unknown dtype": entry(dtype="Q3_K_M"),
    "a dtype that is a list": entry(dtype=["F32"]),
    "a long dtype": entry(dtype="F" * 100_000),
    "negative dimensions": entry(shape=[-4, -4]),
    "dimensions as fractions": entry(shape=[4.0, 4]),
    "dimensions as truth": entry(shape=[True, 16]),
    "dimensions as words": entry(shape=["4", "4"]),
    "a shape that is a number": entry(shape=16),
    "a huge dimension": entry(shape=[1 << 62, 4]),
    "huge dimensions of nothing": entry(shape=[1 << 62, 0], data_offsets=[0, 0]),
    "a dimension of 400 digits": entry(shape=[10**400, 4]),
    "too many dimensions": entry(shape=[1] * 100_000 + [16]),
    "a number of 5000 digits": tensor_file(
        b'{"weight":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,64]}}', DATA
    ),
    "an infinite offset": tensor_file(b'{"weight":{"dtype":"F32","shape":[4,4],"data_offsets":[0,Infinity]}}', DATA),
    "an offset that is no number": tensor_file(
        b'{"weight":{"dtype":"F32","shape":[4,4],"data_offsets":[NaN,64]}}', DATA
    ),
    "negative offsets": entry(data_offsets=[-64, 0]),
    "offsets the wrong way": entry(data_offsets=[64, 0]),
    "offsets beyond the file": entry(data_offsets=[64, 128]),
    "three offsets": entry(data_offsets=[0, 32, 64]),
    "offsets as words": entry(data_offsets=["0", "64"]),
    "offsets far beyond": entry(data_offsets=[1 << 62, (1 << 62) + 64]),
    "too few bytes for the shape": entry(data_offsets=[0, 60]),
    "tensors that overlap": tensor_file({"weight": WEIGHT, "bias": {**WEIGHT, "data_offsets": [32, 96]}}, bytes(96)),
    "the same bytes twice": tensor_file({"weight": WEIGHT, "bias": WEIGHT}, DATA),
}
SPARSE = ("no bytes that are there",)


@pytest.mark.parametrize("name", [*HEADERS, *SPARSE])
def test_headers(tmp_path: Path, name: str) -> None:
    outside = Outside(tmp_path / "outside")
    folder = tmp_path / "stranger"
    folder.mkdir()
    file = folder / "model.safetensors"
    if name in HEADERS:
        file.write_bytes(HEADERS[name])
    else:
        sparse(file)
    model = nn.Linear(4, 4, bias=False)
    before = model.weight.detach().clone()
    with untouched(outside):
        refused(lambda: load_weights(model, folder), "model.safetensors" if "of nothing" not in name else "")
        refused(lambda: DataLoader(file, batch_size=1), "model.safetensors")
        if name != "huge dimensions of nothing":  # which has a header without a fault
            refused(lambda: hf_model.samples(folder), "model.safetensors")
    assert torch.equal(model.weight, before)


def good() -> bytes:
    return tensor_file({"weight": WEIGHT}, DATA)


def index(folder: Path, name: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))


def linked(folder: Path, outside: Outside, name: str) -> None:
    (outside.folder / "theirs.safetensors").write_bytes(good())
    (folder / name).symlink_to(outside.folder / "theirs.safetensors")


def text_index(text: str) -> Callable[[Path, Outside], None]:
    return lambda folder, _: _write(folder / "model.safetensors.index.json", text)


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _named(name: str) -> Callable[[Path, Outside], None]:
    def make(folder: Path, outside: Outside) -> None:
        linked(folder, outside, "unused.safetensors")
        index(folder, name.replace("OUTSIDE", str(outside.folder)))

    return make


def _pipe(folder: Path, _: Outside) -> None:
    os.mkfifo(folder / "a.safetensors")
    index(folder, "a.safetensors")


def _folder(folder: Path, _: Outside) -> None:
    (folder / "a.safetensors").mkdir()
    index(folder, "a.safetensors")


def _link_of_index(folder: Path, outside: Outside) -> None:
    (outside.folder / "index.json").write_text(json.dumps({"weight_map": {"weight": "a.safetensors"}}))
    (folder / "a.safetensors").write_bytes(good())
    (folder / "model.safetensors.index.json").symlink_to(outside.folder / "index.json")


def _link_of_shard(folder: Path, outside: Outside) -> None:
    linked(folder, outside, "a.safetensors")
    index(folder, "a.safetensors")


def _link_of_folder(folder: Path, outside: Outside) -> None:
    (outside.folder / "theirs.safetensors").write_bytes(good())
    (folder / "shards").symlink_to(outside.folder)
    index(folder, "shards/theirs.safetensors")


def _sparse_index(folder: Path, _: Outside) -> None:
    sparse(folder / "model.safetensors.index.json")


INDEXES: dict[str, Callable[[Path, Outside], None]] = {
    "up": _named("../outside/theirs.safetensors"),
    "up, after down": _named("a/../../outside/theirs.safetensors"),
    "from the root": _named("OUTSIDE/theirs.safetensors"),
    "through the root": _named("//OUTSIDE/theirs.safetensors"),
    "the folder": _named("."),
    "no name": _named(""),
    "a NUL": _named("a\0.safetensors"),
    "half a character": _named("a\ud800.safetensors"),
    "a name of 5000 letters": _named("a" * 5000),
    "a pipe": _pipe,
    "a directory": _folder,
    "not there": _named("a.safetensors"),
    "a link of a shard": _link_of_shard,
    "a link on the way": _link_of_folder,
    "a link of the index": _link_of_index,
    "the one file is a link": lambda folder, outside: linked(folder, outside, "model.safetensors"),
    "the only file is a link": lambda folder, outside: linked(folder, outside, "other.safetensors"),
    "a number": lambda folder, _: index(folder, 5),
    "a map that is a list": text_index('{"weight_map": ["a"]}'),
    "no map": text_index("{}"),
    "no object": text_index("[1, 2]"),
    "no JSON": text_index("{"),
    "deep": text_index(DEEP),
    "sparse": _sparse_index,
}


@pytest.mark.parametrize("name", INDEXES)
def test_indexes(tmp_path: Path, name: str) -> None:
    outside = Outside(tmp_path / "outside")
    folder = tmp_path / "stranger"
    folder.mkdir()
    INDEXES[name](folder, outside)
    model = nn.Linear(4, 4, bias=False)
    with untouched(outside):
        refused(lambda: load_weights(model, folder))
        refused(lambda: (hf_model.samples(folder), hf_model.fingerprint(folder)))


def test_links_of_the_hubs_cache_are_its_own(tmp_path: Path) -> None:
    """A snapshot is a folder of links to the blobs beside it; and a folder may itself be a link."""
    (tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs" / "0a1b").write_bytes(good())
    snapshot = tmp_path / "models--a--b" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0a1b")
    assert load_weights(nn.Linear(4, 4, bias=False), snapshot) == ["weight"]
    (tmp_path / "mine").symlink_to(snapshot)
    assert load_weights(nn.Linear(4, 4, bias=False), tmp_path / "mine") == ["weight"]
