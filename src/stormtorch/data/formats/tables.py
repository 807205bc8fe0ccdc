"""Tables that pyarrow holds or decodes, given to the loader in groups of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...core.errors import SettingError
from ..source import DecodedSource, Field
from .arrow_columns import rows_of

_GROUP_ROWS = 4096


class TableSource(DecodedSource):
    """A table in RAM, such as a ``datasets.Dataset.from_dict``. Decoding is a copy of its rows."""

    def __init__(self, name: str, table: Any, columns: Sequence[str] | None) -> None:
        self.name = name
        chosen = table.select(selected(name, table.schema, columns))
        self._batches = chosen.to_batches(max_chunksize=_GROUP_ROWS)
        self.groups = [batch.num_rows for batch in self._batches]
        self.fields = tuple(
            rows_of(column, self._batches[0].column(column), name, 0).field for column in chosen.schema.names
        )

    def decode(self, group: int) -> Mapping[str, Tensor]:
        return tensors_of(self.fields, self._batches[group], self.name, sum(self.groups[:group]))


def tensors_of(fields: Sequence[Field], batch: Any, where: str, first_row: int) -> dict[str, Tensor]:
    """The columns of a record batch as tensors. Raises SettingError if a row has not the shape of its field."""
    tensors = {}
    for field in fields:
        rows = rows_of(field.name, batch.column(field.name), where, first_row)
        if rows.field != field:
            raise SettingError(
                f"{where}: column {field.name!r} has rows of {rows.field.dtype} {rows.field.shape} from row "
                f"{first_row} on, and of {field.dtype} {field.shape} before. Make them equal, or leave the column out "
                "(open_source(..., columns=[...]))."
            )
        tensors[field.name] = rows.tensor()
    return tensors


def selected(where: str, schema: Any, columns: Sequence[str] | None) -> list[str]:
    """The columns to read: all of the table's, or those asked for, in that order."""
    names = list(schema.names)
    if columns is None:
        columns = names
    missing = [name for name in columns if name not in names]
    if missing or not columns or len(set(columns)) < len(columns):
        raise SettingError(
            f"{where} has columns {', '.join(names) or '(none)'}; asked for {', '.join(columns) or 'none'}. "
            "Name some of them, each once."
        )
    return list(columns)
