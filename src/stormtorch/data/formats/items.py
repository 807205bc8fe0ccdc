"""Any map-style torch ``Dataset``: objects that answer ``len(d)`` and ``d[i]``.

What an item is only its own code knows, so the loader asks for items in worker processes, as torch's loader does.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import IterableDataset

from ...core.errors import SettingError


class MapStyle(Sized, Protocol):
    """What is asked of a dataset."""

    def __getitem__(self, row: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class ItemSource:
    """``rows`` items of ``dataset``. ``name`` is what errors call it."""

    name: str
    dataset: MapStyle
    rows: int


def item_source(dataset: object) -> ItemSource:
    """A map-style dataset as a source. Asks for its length and for nothing else."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise SettingError(
            f"{kind} is an IterableDataset: it has no rows to choose from, so it cannot be shuffled, cut by rank or "
            "resumed. Give a map-style Dataset, files, or write it to files with `storm data pack`."
        )
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise SettingError(
            f"{kind} is no source of data. Accepted: a path, a list of paths, a directory, a dict of name to path, "
            "tokens(...), raw(...), a datasets.Dataset, or a map-style torch Dataset (__len__ and __getitem__)."
        )
    try:
        rows = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise SettingError(f"{kind} does not know its length ({error}). Give it a __len__ of its rows.") from error
    if rows == 0:
        raise SettingError(f"{kind} has no rows: its length is 0. Give data with at least one row.")
    return ItemSource(name=kind, dataset=dataset, rows=rows)
