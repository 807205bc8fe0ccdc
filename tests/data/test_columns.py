from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormtorch import SettingError
from stormtorch.data import open_source
from stormtorch.data.source import FileSource

from .reading import read_all


def _save(
    directory: Path, name: str, cuts: list[int], values: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> list[Path]:
    paths = []
    for number, part in enumerate(np.split(values, sorted(cuts))):
        paths.append(directory / f"{name}{number}.npy")
        np.save(paths[-1], part)
    return paths


@settings(max_examples=30)
@given(rows=st.integers(1, 30), data=st.data())
def test_fields_cut_anywhere_stay_aligned(
    tmp_path_factory: pytest.TempPathFactory, rows: int, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("columns")
    values = np.arange(rows)
    cuts = st.lists(st.integers(0, rows), max_size=4)
    what = {
        "x": _save(directory, "x", data.draw(cuts), values),
        "y": _save(directory, "y", data.draw(cuts), values * 10),
        "z": _save(directory, "z", [], values * 100)[0],
    }
    source = open_source(what)
    assert isinstance(source, FileSource)
    assert [field.name for field in source.fields] == ["x", "y", "z"]
    assert all(shard.rows for shard in source.shards)
    found = read_all(source)
    assert found["x"].tolist() == values.tolist()
    assert found["y"].tolist() == (values * 10).tolist()
    assert found["z"].tolist() == (values * 100).tolist()


def test_fields_of_different_lengths_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(5))
    np.save(tmp_path / "y.npy", np.arange(6))
    with pytest.raises(SettingError, match=r"'x' has 5 rows .*x\.npy.*'y' has 6"):
        open_source({"x": tmp_path / "x.npy", "y": tmp_path / "y.npy"})


def test_a_field_is_one_field(tmp_path: Path) -> None:
    np.save(tmp_path / "r.npy", np.zeros(3, dtype=[("a", "u1"), ("b", "u1")]))
    with pytest.raises(SettingError, match=r"'x' names .*r\.npy, which has 2 fields \(a, b\)"):
        open_source({"x": tmp_path / "r.npy"})


def test_columns_are_chosen_by_name(tmp_path: Path) -> None:
    np.save(tmp_path / "r.npy", np.zeros(3, dtype=[("a", "u1"), ("b", "u1")]))
    source = open_source(tmp_path / "r.npy", columns=["b", "a"])
    assert isinstance(source, FileSource)
    assert [field.name for field in source.fields] == ["b", "a"]
    for bad in (["c"], [], ["a", "a"]):
        with pytest.raises(SettingError, match="has fields a, b; asked for"):
            open_source(tmp_path / "r.npy", columns=bad)
