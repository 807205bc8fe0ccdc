from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from stormtorch import SettingError, StorageError
from stormtorch.data import open_source
from stormtorch.data.source import FileSource

from .reading import read_all


def write(path: Path, header: Any, payload: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + payload)
    return path


def entry(dtype: str, shape: list[int], first: int, last: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def test_what_the_library_writes(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = {
        "x": torch.randn(6, 2, 3).to(torch.bfloat16),
        "label": torch.arange(6),
        "mask": torch.tensor([True, False] * 3),
        "small": torch.randn(6, 4).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "a.safetensors", metadata={"note": "no tensor"})
    source = open_source(tmp_path / "a.safetensors")
    assert isinstance(source, FileSource)
    assert source.rows == 6
    found = read_all(source)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_unaligned_payloads_and_shards(tmp_path: Path) -> None:
    header = {"a": entry("U8", [3], 0, 3), "b": entry("I32", [3], 3, 15)}
    for number in range(2):
        values = torch.arange(3, dtype=torch.int32) + 10 * number
        write(tmp_path / f"{number}.safetensors", header, bytes([1, 2, 3]) + values.numpy().tobytes())
    found = read_all(open_source(tmp_path))
    assert found["a"].tolist() == [1, 2, 3, 1, 2, 3]
    assert found["b"].tolist() == [0, 1, 2, 10, 11, 12]
    assert read_all(open_source(tmp_path, columns=["b"])).keys() == {"b"}


@pytest.mark.parametrize(
    ("header", "payload", "error", "words"),
    [
        ({"a": entry("F32", [2, 2], 0, 16)}, bytes(15), StorageError, ["truncated", "'a'"]),
        ({"a": entry("F32", [2, 2], 0, 12)}, bytes(16), StorageError, ["'a'", "needs 16 bytes and has 12"]),
        ({"a": entry("F4", [2], 0, 1)}, bytes(1), SettingError, ["'a'", "dtype F4", "Accepted"]),
        ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [3], 2, 5)}, bytes(5), SettingError, ["'a' has 2 rows", "3"]),
        ({"a": entry("U8", [], 0, 1)}, bytes(1), SettingError, ["'a'", "no rows"]),
        ({"a": entry("U8", [2, 0], 0, 0)}, b"", SettingError, ["'a'", "zero bytes"]),
        ({"a": entry("U8", [0, 2], 0, 0)}, b"", SettingError, ["no rows"]),
        ({"a": {"dtype": "U8"}}, b"", StorageError, ["'a'", "not readable"]),
        ({"a": entry("U8", [-1], 0, 1)}, b"", StorageError, ["'a'", "not readable"]),
        ({}, b"", SettingError, ["no tensors"]),
        (b"[1, 2]", b"", StorageError, ["not a JSON object"]),
        (b"{broken", b"", StorageError, ["not a JSON object"]),
    ],
)
def test_bad_files(tmp_path: Path, header: Any, payload: bytes, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        open_source(write(tmp_path / "a.safetensors", header, payload))
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in [*words, "a.safetensors"]), caught.value


@pytest.mark.parametrize("length", [0, 1 << 40, 100])
def test_headers_beyond_the_file(tmp_path: Path, length: int) -> None:
    with pytest.raises(StorageError, match="cannot hold the header"):
        open_source(write(tmp_path / "a.safetensors", {}, length=length))
