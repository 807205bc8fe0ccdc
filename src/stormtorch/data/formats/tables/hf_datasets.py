"""Hugging Face ``datasets``, read from their Arrow files.

A ``datasets.Dataset`` holds mappings of Arrow files, sliced and joined by ``select``, ``concatenate_datasets`` and
similar calls. This module finds the file of an address in ``/proc/self/maps``, so it handles all of these without
knowing which calls were made.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....core.errors import SettingError, StorageError
from ....memory.disk.contained import inside, parse_json, read_small
from ...source import DecodedSource, FileSource, Strip
from ..items import ItemSource, item_source
from .arrow import Locate, Rows, TableSource, table_in_files


def dataset_source(dataset: Any, columns: Sequence[str] | None = None) -> FileSource | DecodedSource | ItemSource:
    """The rows of a ``datasets.Dataset``: ``columns``, or those that its format selects.

    A dataset in RAM is a ``DecodedSource``, one with a transform an ``ItemSource``.
    """
    if dataset.format["type"] == "custom" and columns is None:
        return item_source(dataset)  # after set_transform only the user's function knows the items
    if dataset._indices is not None:
        raise SettingError(
            f"This datasets.Dataset of {dataset.num_rows} rows is a selection by row number (shuffle, filter, select), "
            "so its rows do not lie together. Call .flatten_indices() first; the loader shuffles by itself."
        )
    name = f"datasets.Dataset of {dataset.num_rows} rows"
    if columns is None and not dataset.format["output_all_columns"]:
        columns = dataset.format["columns"]
    if dataset.num_rows == 0:
        raise SettingError(f"{name}: no rows. Give data with at least one row.")
    table = dataset.data.table
    return table_in_files(name, table, columns, _in_mapped_files()) or TableSource(name, table, columns)


def is_dataset(what: object) -> bool:
    """Whether it is a ``datasets.Dataset``. Refuses similar classes. Imports nothing: an instance implies an import."""
    module = sys.modules.get("datasets")
    if not hasattr(module, "DatasetDict"):  # not imported, or another module with this name
        return False
    assert module is not None
    if isinstance(what, module.DatasetDict | module.IterableDatasetDict):
        raise SettingError(
            f"A {type(what).__name__} is several datasets ({', '.join(map(str, what))}). Choose one of them."
        )
    if isinstance(what, module.IterableDataset):
        raise SettingError(
            "A datasets.IterableDataset has no row numbers, so it cannot be shuffled, divided by rank or resumed. "
            "Load it without streaming=True, or write it to files with `storm data pack`."
        )
    return isinstance(what, module.Dataset)


def saved_files(directory: Path) -> tuple[list[Path], list[str] | None] | None:
    """The Arrow files of a directory that ``save_to_disk`` made, and the columns of its format; else None."""
    splits = directory / "dataset_dict.json"
    if splits.is_file():
        raise SettingError(f"{directory} holds several datasets ({_json(splits).get('splits')}). Name one of them.")
    state = directory / "state.json"
    if not state.is_file():
        return None
    found = _json(state)
    if found.get("_indices_data_files") or found.get("_indices_files"):
        raise SettingError(
            f"{directory} was saved with a selection by row number. Load it with datasets.load_from_disk, call "
            ".flatten_indices(), and give that or save it again."
        )
    try:
        files = [inside(directory, str(file["filename"])) for file in found["_data_files"]]
        columns = None if found.get("_output_all_columns") else found.get("_format_columns")
        if not files or not (columns is None or all(isinstance(name, str) for name in columns)):
            raise TypeError
    except (KeyError, TypeError) as error:
        raise StorageError(f"{state} names no data files. Save the dataset again with save_to_disk.") from error
    return files, columns


def _json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_small(inside(path.parent, path.name)))
    except ValueError as error:
        raise StorageError(f"{path} is damaged: not JSON ({error}). Copy or write it again.") from error
    return found if isinstance(found, dict) else {}


def _in_mapped_files() -> Locate:
    """A function that finds the file that an address of this process is mapped from."""
    mapped = []
    for line in Path("/proc/self/maps").read_text("utf-8", "surrogateescape").splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[5].startswith("/"):
            start, end = (int(part, 16) for part in parts[0].split("-"))
            mapped.append((start, end, int(parts[2], 16), Path(parts[5].replace("\\012", "\n"))))
    starts = [entry[0] for entry in mapped]

    def locate(rows: Rows) -> Strip | None:
        index = bisect.bisect_right(starts, rows.address) - 1
        if index < 0 or rows.address + rows.count * rows.field.row_bytes > mapped[index][1]:
            return None
        start, _, offset, path = mapped[index]
        if not path.is_file():  # deleted, or not a file: only the mapping is left
            return None
        return Strip(path=path, offset=rows.address - start + offset, stride=rows.field.row_bytes)

    return locate
