from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stormtorch import SettingError, StorageError
from stormtorch.data import open_source, raw
from stormtorch.data.formats.plain.arrays import npy_source
from stormtorch.data.source import FileSource

from .reading import read_all, the_field

DTYPES = ["bool", "uint8", "int16", "uint16", "int32", "uint32", "int64", "float16", "float32", "float64", "complex64"]


@settings(max_examples=40)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 9),
    shape=st.lists(st.integers(1, 4), max_size=3),
    version=st.sampled_from([(1, 0), (2, 0)]),
)
def test_npy_round_trip(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, rows: int, shape: list[int], version: tuple[int, int]
) -> None:
    array = (np.arange(rows * int(np.prod(shape, dtype=int))) % 251).astype(dtype).reshape(rows, *shape)
    path = tmp_path_factory.mktemp("npy") / "a.npy"
    with path.open("wb") as file:
        np.lib.format.write_array(file, array, version=version)
    source = npy_source(path)
    assert source.rows == rows
    assert source.fields[0].shape == tuple(shape)
    assert torch.equal(the_field(source), torch.from_numpy(array))


def test_several_files_follow_each_other_in_natural_order(tmp_path: Path) -> None:
    for number in (10, 9, 2):
        np.save(tmp_path / f"shard-{number}.npy", np.full((number, 2), number, dtype=np.float32))
    (tmp_path / "README.md").write_text("notes are no data")
    (tmp_path / ".hidden").write_text("nor is this")
    source = open_source(tmp_path)
    assert isinstance(source, FileSource)
    assert [shard.rows for shard in source.shards] == [2, 9, 10]
    assert torch.equal(the_field(source)[:3, 0], torch.tensor([2.0, 2.0, 9.0]))
    named = open_source([tmp_path / "shard-9.npy", str(tmp_path / "shard-2.npy")])
    assert isinstance(named, FileSource)
    assert [shard.rows for shard in named.shards] == [9, 2]
    matched = open_source(str(tmp_path / "shard-?.npy"))
    assert isinstance(matched, FileSource)
    assert [shard.rows for shard in matched.shards] == [2, 9]


def test_records_become_fields(tmp_path: Path) -> None:
    kind = np.dtype([("image", "u1", (3, 2)), ("label", "<i8")])
    records = np.zeros(5, dtype=kind)
    records["image"] = np.arange(30).reshape(5, 3, 2)
    records["label"] = range(5)
    np.save(tmp_path / "r.npy", records)
    records.tofile(tmp_path / "r.bin")
    for source in (open_source(tmp_path / "r.npy"), raw(tmp_path / "r.bin", dtype=kind)):
        found = read_all(source)
        assert found["image"].shape == (5, 3, 2)
        assert np.array_equal(found["image"].numpy(), records["image"])
        assert found["label"].tolist() == [0, 1, 2, 3, 4]
    assert read_all(open_source(tmp_path / "r.npy", columns=["label"])).keys() == {"label"}


def test_a_memmap_is_read_from_its_file(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(12.0).reshape(4, 3))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    source = open_source(mapped)
    assert isinstance(source, FileSource)
    assert torch.equal(the_field(source), torch.arange(12.0, dtype=torch.float64).view(4, 3))
    for bad in (mapped[1:], np.load(tmp_path / "a.npy", mmap_mode="c")):
        with pytest.raises(SettingError, match=r"a view, copy-on-write"):
            open_source(bad)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "torch.bfloat16"])
def test_raw_of_a_dtype_that_numpy_has_not(tmp_path: Path, dtype: object) -> None:
    rows = torch.arange(24, dtype=torch.bfloat16).view(4, 2, 3)
    (tmp_path / "a.bin").write_bytes(b"head" + rows.view(torch.uint8).numpy().tobytes())
    assert torch.equal(the_field(raw(tmp_path / "a.bin", dtype=dtype, shape=(2, 3), offset=4)), rows)


def test_raw_takes_shards_and_single_numbers(tmp_path: Path) -> None:
    for number in range(3):
        np.full(number + 1, number, dtype=np.int32).tofile(tmp_path / f"{number}.bin")
    assert the_field(raw(tmp_path, dtype="int32")).tolist() == [0, 1, 1, 2, 2, 2]
    assert the_field(raw(tmp_path / "2.bin", dtype=np.int32, shape=3)).tolist() == [[2, 2, 2]]


def _npy(path: Path, array: object) -> Path:
    np.save(path, np.asarray(array))
    return path


def _cut(path: Path, count: int) -> Path:
    path.write_bytes(path.read_bytes()[:-count])
    return path


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda d: d / "no.npy", StorageError, ["no.npy", "does not exist"]),
        (lambda d: _cut(_npy(d / "a.npy", np.ones((4, 8))), 65), StorageError, ["a.npy", "319", "384", "row is 1"]),
        (lambda d: _cut(_npy(d / "a.npy", np.ones(1)), 80), StorageError, ["a.npy", "header is damaged"]),
        (lambda d: _npy(d / "a.npy", np.asfortranarray(np.ones((3, 2)))), SettingError, ["Fortran", "ascontiguous"]),
        (lambda d: _npy(d / "a.npy", np.ones(3, ">f4")), SettingError, [">f4", "little endian"]),
        (lambda d: _npy(d / "a.npy", ["text"]), SettingError, ["<U4", "float32"]),
        (lambda d: _npy(d / "a.npy", 3.0), SettingError, ["a.npy", "no rows"]),
        (lambda d: _npy(d / "a.npy", np.ones((0, 3))), SettingError, ["a.npy", "no rows"]),
        (lambda d: _npy(d / "a.npy", np.ones((3, 0))), SettingError, ["a.npy", "zero bytes"]),
    ],
)
def test_bad_npy_files(tmp_path: Path, make: object, error: type[Exception], words: list[str]) -> None:
    path = make(tmp_path)  # type: ignore[operator]
    with pytest.raises(error) as caught:
        open_source(path)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


def test_objects_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(SettingError, match="object"):
        open_source(tmp_path / "a.npy")


@pytest.mark.parametrize("other", [np.ones((2, 4), np.float32), np.ones((2, 3), np.float64)])
def test_shards_must_agree(tmp_path: Path, other: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
    _npy(tmp_path / "a.npy", np.ones((2, 3), np.float32))
    _npy(tmp_path / "b.npy", other)
    with pytest.raises(SettingError, match=r"a\.npy has rows of data float32 \(3\), .*b\.npy has data float"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "float32", "shape": (3,)}, ["10 bytes", "rows of 12 bytes", "truncated"]),
        ({"dtype": "float33"}, ["float33", "Accepted", "bfloat16"]),
        ({"dtype": ">i4"}, [">i4", "Accepted"]),
        ({"dtype": "<i3"}, ["<i3", "Accepted"]),
        ({"dtype": dict}, ["dict", "Accepted"]),
        ({"dtype": "uint8", "shape": (0,)}, ["shape=0", "at least 1"]),
        ({"dtype": "uint8", "shape": 2.5}, ["shape", "Accepted"]),
        ({"dtype": "uint8", "offset": 11}, ["10 bytes", "11 bytes of header"]),
        ({"dtype": "uint8", "offset": 10}, ["no rows"]),
    ],
)
def test_bad_raw(tmp_path: Path, arguments: dict[str, object], words: list[str]) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(10))
    with pytest.raises((SettingError, StorageError)) as caught:
        raw(tmp_path / "a.bin", **arguments)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_pipe_is_refused_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="not a plain file"):
        raw(tmp_path / "pipe", dtype="uint8")
