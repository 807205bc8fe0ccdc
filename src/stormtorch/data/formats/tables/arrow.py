"""Arrow IPC files and streams.

A record batch stores each column contiguously, so a column of fixed width is a strip of the file. `arrow_source` maps
the file, takes the address of the column's numbers from pyarrow, and subtracts the mapping's address: that is the
offset in the file. Then it drops the mapping; the loader reads the file itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ....core.errors import SettingError, StorageError
from ...source import Field, FileSource, Shard, Strip
from ..columns import cut_together, selected
from ..paths import file_size, read_at
from .arrow_tables import Rows, arrow_errors, pyarrow, rows_of

Locate = Callable[[Rows], Strip | None]  # the strip of the rows; None if they are in no file


class CompressedArrow(SettingError):
    """The Arrow file is compressed, so its columns cannot be read from it directly."""


def arrow_source(path: Path, columns: Sequence[str] | None = None) -> FileSource:
    """The rows of one Arrow IPC file or stream. Maps it during the call; reads the layout and list offsets."""
    size = file_size(path)
    if size == 0:
        raise StorageError(f"{path} is empty: 0 bytes are not an Arrow file. Write it again.")
    arrow = pyarrow()
    with arrow_errors(str(path)), arrow.memory_map(str(path)) as mapped:
        buffer = mapped.read_buffer()

        def locate(rows: Rows) -> Strip | None:
            offset = rows.address - buffer.address
            inside = 0 <= offset <= size - rows.count * rows.field.row_bytes
            return Strip(path=path, offset=offset, stride=rows.field.row_bytes) if inside else None

        tables = (_checked(batch) for batch in batches_of(path, arrow.BufferReader(buffer)))
        fields, shards = shards_of(str(path), tables, columns, locate)
    if None in shards:
        raise CompressedArrow(
            f"{path} is compressed, so its columns cannot be read from it directly. Write it without compression "
            "(pyarrow.ipc.IpcWriteOptions(compression=None)), or pack it with `storm data pack`."
        )
    return FileSource(name=str(path), fields=fields, shards=tuple(shard for shard in shards if shard))


def batches_of(path: Path, opened: Any) -> Iterator[Any]:
    """The record batches of an opened Arrow IPC file or stream, in order."""
    ipc = pyarrow(".ipc")
    if read_at(path, 0, 6) == b"ARROW1":
        reader = ipc.open_file(opened)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        yield from ipc.open_stream(opened)


def read_batches(path: Path) -> Iterator[Any]:
    """The record batches of an Arrow IPC file or stream, compressed or not. Raises StorageError for a damaged one."""
    with arrow_errors(str(path)), pyarrow().OSFile(str(path)) as file:
        yield from batches_of(path, file)


def shards_of(
    where: str, tables: Iterable[Any], columns: Sequence[str] | None, locate: Locate
) -> tuple[tuple[Field, ...], list[Shard | None]]:
    """A shard for each contiguous run of rows; None if rows are in no file."""
    fields: tuple[Field, ...] = ()
    shards: list[Shard | None] = []
    first_row = 0
    for table in tables:
        chosen = selected(where, "columns", table.schema.names, columns)
        pieces: list[list[tuple[int, Strip]]] = []
        found: list[Field] = []
        for name in chosen:
            pieces.append([])
            row = first_row
            for chunk in table.column(name).chunks:
                if not len(chunk):
                    continue
                rows = rows_of(name, chunk, where, row)
                known = [field for field in (*fields, *found) if field.name == name]
                if known and known[0] != rows.field:
                    raise SettingError(
                        f"{where}: column {name!r} has rows of shape {known[0].shape} up to row {row}, and of "
                        f"{rows.field.shape} from there on. Make them equal, or leave the column out "
                        "(open_source(..., columns=[...]))."
                    )
                if not known:
                    found.append(rows.field)
                strip = locate(rows)
                if strip is None:
                    return fields, [None]
                pieces[-1].append((len(chunk), strip))
                row += len(chunk)
        fields = fields or tuple(found)
        shards.extend(cut_together(pieces))
        first_row += table.num_rows
    return fields, shards


def _checked(batch: Any) -> Any:
    """A batch as a table, after checking that its buffers are long enough for its columns."""
    batch.validate()
    return pyarrow().Table.from_batches([batch])
