from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stormtorch import SettingError, StorageError
from stormtorch.data import open_source
from stormtorch.data.loader import DataLoader
from stormtorch.data.source import DecodedSource

from .reading import read_all

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write(path: Path, columns: dict[str, Any], *, group: int = 4) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


def opened(what: object, **options: Any) -> DecodedSource:
    source = open_source(what, **options)
    assert isinstance(source, DecodedSource)
    return source


def test_round_trip_of_several_files(tmp_path: Path) -> None:
    x = np.arange(60, dtype=np.float32).reshape(10, 6)
    for number in range(2):
        fixed = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel() + number), 6)
        lists = pa.array([[[i, 1], [2, number]] for i in range(10)], pa.list_(pa.list_(pa.int16())))
        write(tmp_path / f"{number}.parquet", {"x": fixed, "y": range(10), "z": lists, "text": ["t"] * 10})
    source = opened(tmp_path, columns=["x", "z", "y"])
    assert list(source.groups) == [4, 4, 2, 4, 4, 2]
    assert source.rows == 20
    found = read_all(source)
    assert list(found) == ["x", "z", "y"]
    assert torch.equal(found["x"], torch.from_numpy(np.concatenate([x, x + 1])))
    assert found["y"].tolist() == [*range(10)] * 2
    assert found["z"][13].tolist() == [[3, 1], [2, 1]]
    assert found["z"].dtype == torch.int16
    assert source.place_of(13) == f"row 3 of {tmp_path / '1.parquet'}"


def test_a_full_shuffle_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"y": range(400)})
    with DataLoader(path, 10, shuffle="full") as loader, pytest.raises(SettingError, match="whole groups"):
        next(iter(loader))


def test_groups_are_decoded_by_several_threads(tmp_path: Path) -> None:
    source = opened(write(tmp_path / "a.parquet", {"y": range(400)}, group=10))
    found: dict[int, list[int]] = {}

    def work(first: int) -> None:
        for group in range(first, 40, 4):
            found[group] = source.decode(group)["y"].tolist()

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {group: list(range(10 * group, 10 * group + 10)) for group in range(40)}


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (["a"] * 8, ["type string"]),
        ([[1, 2]] * 5 + [[1]] * 3, ["different lengths", "rows 4 to 7"]),
        ([True] * 8, ["booleans"]),
    ],
)
def test_bad_columns_are_known_when_opened(tmp_path: Path, column: list[Any], words: list[str]) -> None:
    path = write(tmp_path / "a.parquet", {"good": range(8), "bad": column})
    with pytest.raises(SettingError) as caught:
        open_source(path)
    assert all(word in str(caught.value) for word in [*words, "a.parquet", "'bad'"]), caught.value


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ([1] * 6 + [None, 1], ["no value in row 6", "row group 1"]),
        ([[1, 2]] * 4 + [[1], [1, 2, 3], [1, 2], [1, 2]], ["different lengths", "in row 5"]),
    ],
)
def test_bad_rows_are_named_when_decoded(tmp_path: Path, column: list[Any], words: list[str]) -> None:
    source = opened(write(tmp_path / "a.parquet", {"bad": column}))
    assert len(source.decode(0)["bad"]) == 4
    with pytest.raises(SettingError) as caught:
        source.decode(1)
    assert all(word in str(caught.value) for word in [*words, "a.parquet"]), caught.value


def test_files_that_differ(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"x": [1, 2]})
    write(tmp_path / "b.parquet", {"x": [1.0, 2.0]})
    with pytest.raises(SettingError, match=r"a\.parquet has rows of x int64, .*b\.parquet has x float64"):
        open_source(tmp_path)


def test_truncated_missing_and_empty_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"x": range(1000)})
    whole = path.read_bytes()
    source = opened(path)
    path.write_bytes(whole[:200])
    with pytest.raises(StorageError, match=r"a\.parquet is not a complete Parquet file"):
        open_source(path)
    with pytest.raises(StorageError, match=r"a\.parquet, row group 200 is not a complete Parquet file"):
        source.decode(200)
    path.unlink()
    with pytest.raises(StorageError, match=r"a\.parquet.*does not exist"):
        source.decode(0)
    with pytest.raises(SettingError, match="no rows"):
        open_source(write(tmp_path / "none.parquet", {"x": pa.array([], pa.int64())}))
