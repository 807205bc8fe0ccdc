"""Arrow IPC files and streams.

A record batch stores each column contiguously, so a column of fixed width is a strip of the file. `arrow_source` maps
the file, takes the address of the column's numbers from pyarrow, and subtracts the mapping's address: that is the
offset in the file. Then it drops the mapping; the loader reads the file itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ....core.errors import SettingError, StorageError
from ...source import Field, FileSource, Strip
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

        batches = list(batches_of(path, arrow.BufferReader(buffer)))
        for batch in batches:
            batch.validate()  # that its buffers are long enough for its columns
        if not batches:
            return FileSource(name=str(path), fields=(), shards=())
        source = table_in_files(str(path), arrow.Table.from_batches(batches), columns, locate)
    if source is None:
        raise CompressedArrow(
            f"{path} is compressed, so its columns cannot be read from it directly. Write it without compression "
            "(pyarrow.ipc.IpcWriteOptions(compression=None)), or pack it with `storm data pack`."
        )
    return source


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


def table_in_files(name: str, table: Any, columns: Sequence[str] | None, locate: Locate) -> FileSource | None:
    """The rows of a table, with a shard for each contiguous run of them; None if rows are in no file."""
    fields: list[Field] = []
    strips: list[list[tuple[int, Strip]]] = []
    for column in selected(name, "columns", table.schema.names, columns):
        row, field = 0, None
        strips.append([])
        for chunk in table.column(column).chunks:
            if len(chunk):
                rows = rows_of(column, chunk, name, row, field)
                strip = locate(rows)
                if strip is None:
                    return None
                field = rows.field
                strips[-1].append((len(chunk), strip))
                row += len(chunk)
        fields += [] if field is None else [field]
    return FileSource(name=name, fields=tuple(fields), shards=tuple(cut_together(strips)))
