from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stormtorch import SettingError, StorageError
from stormtorch.data import open_source
from stormtorch.data.formats.items import ItemSource
from stormtorch.data.source import DecodedSource, FileSource

from .reading import read_all

pa = pytest.importorskip("pyarrow")
ROWS = 10


def columns() -> dict[str, Any]:
    """One column of each form that is accepted."""
    numbers = np.arange(ROWS * 6, dtype=np.float32)
    return {
        "id": pa.array(range(ROWS), pa.int64()),
        "half": pa.array(np.arange(ROWS, dtype=np.float16)),
        "byte": pa.array(range(ROWS), pa.uint8()),
        "fixed": pa.FixedSizeListArray.from_arrays(pa.array(numbers), 6),
        "list": pa.array([[i, i + 1] for i in range(ROWS)], pa.list_(pa.int32())),
        "large": pa.array([[i] * 3 for i in range(ROWS)], pa.large_list(pa.uint16())),
        "nested": pa.array([[[i, 1], [2, 3], [4, i]] for i in range(ROWS)], pa.list_(pa.list_(pa.int64(), 2))),
    }


def write(path: Path, table: Any, *, stream: bool = False, batch: int = 4, compression: str | None = None) -> Path:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("stream", [False, True])
def test_every_form_of_column(tmp_path: Path, stream: bool) -> None:
    path = write(tmp_path / "a.arrow", pa.table(columns()), stream=stream)
    source = open_source(path)
    assert isinstance(source, FileSource)
    assert not mapped(path)
    assert [shard.rows for shard in source.shards] == [4, 4, 2]
    found = read_all(source)
    for name, column in columns().items():
        expected = torch.tensor(column.to_pylist(), dtype=found[name].dtype)
        assert torch.equal(found[name], expected), name
    assert found["nested"].shape == (ROWS, 3, 2)


def test_directories_and_columns(tmp_path: Path) -> None:
    table = pa.table({"x": range(5), "text": list("abcde")})
    write(tmp_path / "9.arrow", table, stream=True)
    write(tmp_path / "10.arrow", table)
    source = open_source(tmp_path, columns=["x"])
    assert read_all(source)["x"].tolist() == [0, 1, 2, 3, 4] * 2
    with pytest.raises(SettingError, match=r"has columns x, text; asked for y"):
        open_source(tmp_path, columns=["y"])
    with pytest.raises(SettingError, match=r"9\.arrow: column 'text' is of type string.*columns=.*storm data pack"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (["a"] * ROWS, ["type string"]),
        ([True] * ROWS, ["booleans", "uint8"]),
        ([1] * 7 + [None] * 3, ["no value in row 7"]),
        ([[1, 2]] * 5 + [[1, None]] * 5, ["no value in row 5"]),
        ([[1, 2]] * 2 + [[1]] * 8, ["lists of different lengths", "2 in row 0", "1 in row 2"]),
        ([[1, 2]] * 4 + [[1]] * 6, ["(2,) up to row 4", "(1,)"]),
        ([[]] * ROWS, ["empty lists"]),
        ([{"a": 1}] * ROWS, ["struct"]),
        ([None] * ROWS, ["no value in row 0"]),
    ],
)
def test_columns_without_a_fixed_width(tmp_path: Path, column: list[Any], words: list[str]) -> None:
    path = write(tmp_path / "a.arrow", pa.table({"good": range(ROWS), "bad": column}))
    with pytest.raises(SettingError) as caught:
        open_source(path)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in [*words, "a.arrow", "'bad'"]), caught.value
    assert read_all(open_source(path, columns=["good"]))["good"].tolist() == list(range(ROWS))


def test_timestamps_and_dictionaries_are_refused(tmp_path: Path) -> None:
    for column in (pa.array([1], pa.timestamp("s")), pa.array(["a"]).dictionary_encode()):
        with pytest.raises(SettingError, match="'t' is of type"):
            open_source(write(tmp_path / "a.arrow", pa.table({"t": column})))


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_files_are_refused(tmp_path: Path, codec: str) -> None:
    table = pa.table({"x": np.zeros(10000)})
    with pytest.raises(SettingError, match=r"a\.arrow is compressed.*compression=None.*storm data pack"):
        open_source(write(tmp_path / "a.arrow", table, compression=codec, batch=10000))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("left", [0, 4, 20, 700])
def test_truncated_files(tmp_path: Path, stream: bool, left: int) -> None:
    path = write(tmp_path / "a.arrow", pa.table({"x": np.arange(100.0)}), stream=stream, batch=100)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises((StorageError, SettingError)) as caught:
        open_source([path])
    assert "\n" not in str(caught.value)
    assert "a.arrow" in str(caught.value)


def test_no_rows(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="no rows"):
        open_source(write(tmp_path / "a.arrow", pa.table({"x": pa.array([], pa.int64())})))


def test_a_module_of_ones_own_called_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))
    assert isinstance(open_source(range(3)), ItemSource)


class TestDatasets:
    """Objects of Hugging Face ``datasets`` and what they save."""

    @pytest.fixture(autouse=True)
    def _quiet(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        self.datasets = pytest.importorskip("datasets")
        self.datasets.disable_progress_bars()
        self.directory = tmp_path / "saved"

    def save(self, rows: int = 25, **options: Any) -> Any:
        features = self.datasets.Features(
            {
                "x": self.datasets.Array2D((2, 3), "float32"),
                "label": self.datasets.Value("int64"),
                "text": self.datasets.Value("string"),
            }
        )
        data = {
            "x": np.arange(rows * 6, dtype=np.float32).reshape(rows, 2, 3),
            "label": list(range(rows)),
            "text": ["t"] * rows,
        }
        made = self.datasets.Dataset.from_dict(data, features=features)
        made.save_to_disk(self.directory, **options)
        return made

    def test_saved_directories(self) -> None:
        self.save(num_shards=3)
        source = open_source(self.directory, columns=["x", "label"])
        assert isinstance(source, FileSource)
        found = read_all(source)
        assert torch.equal(found["x"], torch.arange(150.0).view(25, 2, 3))
        assert found["label"].tolist() == list(range(25))

    def test_the_format_of_a_saved_directory_is_honoured(self) -> None:
        made = self.save()
        made.with_format("torch", columns=["label"]).save_to_disk(self.directory.with_name("formatted"))
        source = open_source(self.directory.with_name("formatted"))
        assert read_all(source).keys() == {"label"}

    def test_objects_with_slices_and_chosen_columns(self) -> None:
        self.save(num_shards=2)
        loaded = self.datasets.load_from_disk(self.directory)
        part = loaded.select(range(3, 20)).with_format("torch", columns=["x", "label"])
        both = self.datasets.concatenate_datasets(
            [part.select_columns(["x", "label"]), loaded.select_columns(["x", "label"])]
        )
        for dataset, labels in ((part, list(range(3, 20))), (both, [*range(3, 20), *range(25)])):
            source = open_source(dataset)
            assert isinstance(source, FileSource)
            assert all(strip.path.parent == self.directory for shard in source.shards for strip in shard.strips)
            found = read_all(source)
            assert found["label"].tolist() == labels
            assert found["x"][:, 0, 0].tolist() == [6.0 * label for label in labels]
        assert read_all(open_source(loaded, columns=["label"])).keys() == {"label"}

    def test_objects_in_memory_are_decoded(self) -> None:
        made = self.save(rows=5000)
        source = open_source(made, columns=["x", "label"])
        assert isinstance(source, DecodedSource)
        assert list(source.groups) == [4096, 904]
        assert read_all(source)["label"].tolist() == list(range(5000))
        assert source.decode(1)["x"].is_contiguous()

    def test_deleted_files_are_read_through_the_mapping(self) -> None:
        self.save()
        loaded = self.datasets.load_from_disk(self.directory).select_columns(["label"])
        for path in self.directory.glob("*.arrow"):
            path.unlink()
        source = open_source(loaded)
        assert isinstance(source, DecodedSource)
        assert read_all(source)["label"].tolist() == list(range(25))

    def test_transforms_make_items(self) -> None:
        made = self.save().with_transform(lambda rows: {"n": [len(text) for text in rows["text"]]})
        source = open_source(made)
        assert isinstance(source, ItemSource)
        assert source.dataset[3] == {"n": 1}

    def test_selections_by_row_number_are_refused(self) -> None:
        made = self.save().select_columns(["label"])
        shuffled = made.shuffle(seed=0)
        with pytest.raises(SettingError, match="flatten_indices"):
            open_source(shuffled)
        flat = read_all(open_source(shuffled.flatten_indices()))["label"].tolist()
        assert sorted(flat) == list(range(25))
        assert flat == list(shuffled["label"])

    def test_relatives_are_refused(self) -> None:
        made = self.save()
        both = self.datasets.DatasetDict({"train": made, "test": made})
        both.save_to_disk(self.directory.with_name("both"))
        with pytest.raises(SettingError, match=r"several datasets \(train, test\)"):
            open_source(both)
        with pytest.raises(SettingError, match=r"both holds several datasets .*'train'"):
            open_source(self.directory.with_name("both"))
        with pytest.raises(SettingError, match="IterableDataset has no row numbers"):
            open_source(made.to_iterable_dataset())
        with pytest.raises(SettingError, match="no rows"):
            open_source(made.select(range(0)))

    def test_a_missing_shard(self) -> None:
        self.save(num_shards=2)
        (self.directory / "data-00001-of-00002.arrow").unlink()
        with pytest.raises(StorageError, match=r"data-00001-of-00002\.arrow.*does not exist"):
            open_source(self.directory, columns=["label"])
