"""Any map-style torch ``Dataset``: objects with ``len(d)`` and ``d[i]``.

Only the dataset's code can make an item, so the loader calls it in worker processes, as torch's loader does.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from ...core.errors import SettingError
from ..source import RowSource


class ItemSource(RowSource):
    """The items of ``dataset``. It has no fields before torch has made a batch of items."""

    fields = ()

    def __init__(self, name: str, dataset: Any, rows: int) -> None:
        self.name, self.dataset, self.groups = name, dataset, [rows]


def item_source(dataset: object) -> ItemSource:
    """A map-style dataset as a source. Calls its ``__len__`` only."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise SettingError(
            f"{kind} is an IterableDataset: it has no row numbers, so it cannot be shuffled, divided by rank or "
            "resumed. Give a map-style Dataset, files, or write it to files with `storm data pack`."
        )
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise SettingError(
            f"{kind} is not a source of data. Accepted: a path, a list of paths, a directory, a dict of name to path, "
            "tokens(...), raw(...), a datasets.Dataset, or a map-style torch Dataset (__len__ and __getitem__)."
        )
    try:
        rows = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise SettingError(f"{kind} has no length ({error}). Give it a __len__ that counts its rows.") from error
    if rows == 0:
        raise SettingError(f"{kind} has no rows: its length is 0. Give data with at least one row.")
    return ItemSource(kind, dataset, rows)
