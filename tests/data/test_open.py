from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from stormtorch import SettingError, StorageError, StormError
from stormtorch.data import open_source, tokens
from stormtorch.data.formats.paths import natural_order
from stormtorch.data.source import FileSource

from .reading import read_all, the_field


def test_sources_pass_through(tmp_path: Path) -> None:
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "t.bin")
    source = tokens(tmp_path / "t.bin", sequence=4)
    assert open_source(source) is source


def test_lists_of_sources_and_dicts_of_sources(tmp_path: Path) -> None:
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "t.bin")
    np.save(tmp_path / "y.npy", np.arange(4))
    rows = tokens(tmp_path / "t.bin", sequence=4)
    assert the_field(open_source([rows, tokens(tmp_path / "t.bin", sequence=4)])).shape == (4, 5)
    found = read_all(open_source({"t": [rows, rows], "y": str(tmp_path / "y.npy")}))
    assert found["t"].shape == (4, 5)
    assert found["y"].tolist() == [0, 1, 2, 3]


def test_opening_leaves_no_descriptor_open(tmp_path: Path) -> None:
    for number in range(20):
        np.save(tmp_path / f"{number}.npy", np.ones((2, 2)))
    before = len(list(Path("/proc/self/fd").iterdir()))
    open_source(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_natural_order() -> None:
    names = ["a10", "a9", "a09", "b1", "a", "a9b", "10", "9"]
    ordered = [path.name for path in sorted(map(Path, names), key=natural_order)]
    assert ordered == ["9", "10", "a", "a09", "a9", "a9b", "a10", "b1"]


def _directory(path: Path, **files: bytes) -> Path:
    path.mkdir()
    for name, data in files.items():
        (path / name.replace("_", ".")).write_bytes(data)
    return path


def _npy(path: Path) -> bytes:
    np.save(path / "made.npy", np.ones(3))
    data = (path / "made.npy").read_bytes()
    (path / "made.npy").unlink()
    return data


def _with_directory(path: Path) -> Path:
    _directory(path)
    (path / "train").mkdir()
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: d / "no", ["no", "does not exist"]),
        (lambda d: d / "no-*.npy", ["No file matches", "no-*.npy"]),
        (lambda d: _directory(d / "e"), ["holds no data files"]),
        (lambda d: _directory(d / "e", a_json=b"{}"), ["holds no data files (1 others)"]),
        (lambda d: _with_directory(d / "e"), ["1 directories", "'train'"]),
        (
            lambda d: _directory(d / "e", a_npy=_npy(d), b_parquet=b"PAR1 and more"),
            ["mixes kinds", "a.npy is .npy", "b.parquet is Parquet"],
        ),
        (lambda d: _directory(d / "e", a_bin=b"flat"), ["a.bin (4 bytes)", "raw(path", "tokens(path"]),
        (lambda d: _directory(d / "e", a_npz=b"PK\x03\x04"), ["a.npz", "np.save"]),
        (lambda d: _directory(d / "e", a_npy=b""), ["a.npy (0 bytes)"]),
        (lambda _: [], ["empty list"]),
        (lambda _: {}, ["empty dict"]),
        (lambda _: {"x": [1, 2]}, ["int is not a source"]),
        (lambda _: {"x": Items()}, ["Field 'x' is Items", "storm data pack"]),
        (lambda _: [Items()], ["Items is in a list"]),
    ],
)
def test_what_cannot_be_opened(tmp_path: Path, make: object, words: list[str]) -> None:
    what = make(tmp_path)  # type: ignore[operator]
    with pytest.raises(StormError) as caught:
        open_source(what)
    assert isinstance(caught.value, SettingError | StorageError)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


class Items:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> int:
        return row


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_that_may_not_be_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(3))
    (tmp_path / "a.npy").chmod(0)
    with pytest.raises(StorageError, match="permission is denied"):
        open_source(tmp_path / "a.npy")


def test_a_directory_of_a_thousand_shards(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", np.ones((4, 4)))
    for number in range(1, 1000):
        os.link(tmp_path / "0.npy", tmp_path / f"{number}.npy")
    source = open_source(tmp_path)
    assert isinstance(source, FileSource)
    assert source.rows == 4000
