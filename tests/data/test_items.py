from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from stormtorch import SettingError
from stormtorch.data import open_source
from stormtorch.data.formats.items import ItemSource


class Squares(Dataset[int]):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> int:
        return row * row


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Unsized(Dataset[int]):
    def __getitem__(self, row: int) -> int:
        return row


def test_map_style_datasets_are_taken_as_they_are() -> None:
    dataset = Squares(7)
    source = open_source(dataset)
    assert isinstance(source, ItemSource)
    assert (source.name, source.rows) == ("Squares", 7)
    assert source.dataset is dataset
    assert open_source(source) is source
    tensors = open_source(TensorDataset(torch.arange(3), torch.arange(3)))
    assert isinstance(tensors, ItemSource)
    assert tensors.rows == 3


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (Endless(), ["Endless", "IterableDataset", "map-style"]),
        (Unsized(), ["Unsized", "Accepted"]),
        (Squares(0), ["Squares", "no rows"]),
        (7, ["int is not a source", "Accepted: a path"]),
        (None, ["NoneType is not a source"]),
        ((row for row in range(3)), ["generator is not a source"]),
    ],
)
def test_what_has_no_rows_is_refused(what: object, words: list[str]) -> None:
    with pytest.raises(SettingError) as caught:
        open_source(what)
    assert all(word in str(caught.value) for word in words), caught.value


def test_columns_of_items_cannot_be_chosen() -> None:
    with pytest.raises(SettingError, match="does not work with Squares"):
        open_source(Squares(3), columns=["a"])
