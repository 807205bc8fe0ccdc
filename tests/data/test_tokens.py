from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stormtorch import SettingError, StorageError, StormError
from stormtorch.data import tokens

from .reading import the_field


def megatron(directory: Path, lengths: list[int], dtype: str = "<u2", code: int = 8, version: int = 1) -> Path:
    """A dataset as Megatron writes it: the tokens 0, 1, 2, ..., and an index of their sequences."""
    values = np.arange(sum(lengths)).astype(dtype)
    values.tofile(directory / "m.bin")
    places = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * values.itemsize
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", version, code, len(lengths), len(lengths) + 1)
    body = np.array(lengths, "<i4").tobytes() + places.astype("<i8").tobytes()
    (directory / "m.idx").write_bytes(head + body + np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    return directory / "m.bin"


def llmc(path: Path, count: int, dtype: str = "<u2", magic: int = 20240520, version: int = 1) -> Path:
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, count
    path.write_bytes(head.tobytes() + np.arange(count).astype(dtype).tobytes())
    return path


@settings(max_examples=60)
@given(count=st.integers(1, 60), sequence=st.integers(1, 9), extra=st.integers(0, 2), stride=st.integers(1, 12))
def test_windows_are_cut_by_the_formula(
    tmp_path_factory: pytest.TempPathFactory, count: int, sequence: int, extra: int, stride: int
) -> None:
    path = tmp_path_factory.mktemp("tokens") / "t.bin"
    flat = np.arange(count, dtype=np.uint16)
    flat.tofile(path)
    length = sequence + extra
    expected = [flat[i : i + length].tolist() for i in range(0, count, stride) if i + length <= count]
    if not expected:
        with pytest.raises(SettingError, match=f"a row needs {length} tokens .* has {count}"):
            tokens(path, sequence=sequence, extra=extra, stride=stride)
    else:
        assert the_field(tokens(path, sequence=sequence, extra=extra, stride=stride)).tolist() == expected


def test_by_default_every_token_but_the_first_is_a_target_once(tmp_path: Path) -> None:
    np.arange(8 * 5 + 1, dtype=np.uint16).tofile(tmp_path / "t.bin")
    rows = the_field(tokens(tmp_path / "t.bin", sequence=8))
    assert rows[:, 1:].flatten().tolist() == list(range(1, 41))
    assert rows[:, :-1].flatten().tolist() == list(range(40))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint32", "int64", np.int64, torch.int32])
def test_the_dtype_is_as_said(tmp_path: Path, dtype: object) -> None:
    name = str(dtype).removeprefix("torch.") if not isinstance(dtype, type) else "int64"
    np.arange(100).astype(name).tofile(tmp_path / "t.bin")
    source = tokens(tmp_path / "t.bin", sequence=9, dtype=dtype)
    assert str(source.fields[0].dtype) == f"torch.{name}"
    assert the_field(source)[1].tolist() == list(range(9, 19))


def test_kinds_that_say_their_dtype(tmp_path: Path) -> None:
    np.save(tmp_path / "n.npy", np.arange(50, dtype=np.int32))
    paths = {
        "uint16": megatron(tmp_path, [20, 5, 25]),
        "int32": tmp_path / "n.npy",
        "uint32": llmc(tmp_path / "l.bin", 50, "<u4", 20240801, 7),
    }
    for dtype, path in paths.items():
        source = tokens(path, sequence=24)
        assert str(source.fields[0].dtype) == f"torch.{dtype}"
        assert the_field(source).tolist() == [list(range(25)), list(range(24, 49))]
        with pytest.raises(SettingError, match=f"{dtype} tokens, and dtype='int64' was given"):
            tokens(path, sequence=24, dtype="int64")


def test_directories_and_lists_are_shards(tmp_path: Path) -> None:
    for number in range(12):
        llmc(tmp_path / f"s{number}.bin", 10 + number)
    source = tokens(tmp_path, sequence=8)
    assert [shard.strips[0].path.name for shard in source.shards][:3] == ["s0.bin", "s1.bin", "s2.bin"]
    assert [shard.rows for shard in source.shards] == [1] * 7 + [2] * 5
    assert tokens([tmp_path / "s7.bin", tmp_path / "s0.bin"], sequence=8).rows == 3
    # a file that is too short for a row is no error where another is not
    assert tokens([tmp_path / "s0.bin", tmp_path / "s9.bin"], sequence=15).rows == 1


def _broken_index(directory: Path) -> Path:
    path = megatron(directory, [4, 4])
    index = path.with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:-20])
    return path


def _short(path: Path, count: int = 1) -> Path:
    path.write_bytes(path.read_bytes()[:-count])
    return path


def _foreign_index(directory: Path) -> Path:
    path = megatron(directory, [4, 4])
    path.with_suffix(".idx").write_bytes(b"something else altogether, long enough for a header")
    return path


def _wide(directory: Path, vocabulary: int = 1000) -> Path:
    np.linspace(0, vocabulary - 1, 1000).astype(np.uint32).tofile(directory / "w.bin")
    return directory / "w.bin"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: d / "no.bin", ["no.bin", "does not exist"]),
        (_broken_index, ["m.idx", "truncated", "2 sequences"]),
        (lambda d: _short(megatron(d, [4, 4]), 2), ["m.bin has 14 bytes", "promises 16", "2 sequences of uint16"]),
        (lambda d: megatron(d, [4], "<f8", 6), ["m.idx", "dtype code 6"]),
        (lambda d: megatron(d, [4], version=2), ["version 2", "Accepted: version 1"]),
        (_foreign_index, ["m.idx", "wrong magic", "Move it away"]),
        (lambda d: _short(llmc(d / "l.bin", 30)), ["l.bin has 1083 bytes", "promises 1084", "30 tokens of uint16"]),
        (_wide, ["w.bin", "dtype='uint32'"]),
        (lambda d: _wide(d, 128_256), ["w.bin", "dtype='uint32'"]),
        (lambda d: _short(megatron(d, [4]).rename(d / "odd.bin")), ["odd.bin has 7 bytes", "whole number of uint16"]),
    ],
)
def test_bad_files(tmp_path: Path, make: object, words: list[str]) -> None:
    path = make(tmp_path)  # type: ignore[operator]
    with pytest.raises(StormError) as caught:
        tokens(path, sequence=2)
    assert isinstance(caught.value, SettingError | StorageError)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sequence": 0}, ["sequence=0", "at least 1"]),
        ({"sequence": True}, ["sequence=True"]),
        ({"sequence": "8"}, ["sequence='8'"]),
        ({"extra": -1}, ["extra=-1", "at least 0"]),
        ({"stride": 0}, ["stride=0", "at least 1"]),
        ({"dtype": "float32"}, ["float32", "not a dtype of tokens", "uint16"]),
    ],
)
def test_bad_settings(tmp_path: Path, arguments: dict[str, object], words: list[str]) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "t.bin")
    with pytest.raises(SettingError) as caught:
        tokens(tmp_path / "t.bin", **arguments)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value


def test_arrays_of_rows_are_no_flat_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((3, 4), np.int64))
    with pytest.raises(SettingError, match=r"data int64 \(4\) in each row, not flat tokens"):
        tokens(tmp_path / "a.npy", sequence=2)
