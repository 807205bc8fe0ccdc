"""Writes a packed directory (``packed.py``). A directory with its name is always complete.

The writer fills ``.NAME.partial`` beside the final place. It fsyncs each file before the next, writes the index last,
then renames the directory. An error or Ctrl-C removes the partial directory. Only a kill or a power cut leaves it: no
reader takes it for data, and the next writer clears it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from ...core.errors import SettingError
from ...memory.disk.calls import storage_errors
from ...memory.disk.contained import check_no_link
from ..formats.plain.packed import INDEX, Index, Kind, PackedFile, PackedShard, to_json
from ..source import Field


class PackWriter:
    """Appends rows to shards of at most ``shard_bytes`` (at least one row). A context manager; for one thread.

    The end of the ``with`` publishes the directory; an exception in it removes everything.
    """

    def __init__(
        self,
        out: Path,
        *,
        kind: Kind,
        fields: Sequence[Field],
        shard_bytes: int,
        made_with: Mapping[str, object] | None = None,
    ) -> None:
        self.out, self.kind, self.fields = out, kind, tuple(fields)
        self.made_with = dict(made_with or {})
        self.rows = 0  # written so far
        self._rows_per_shard = max(shard_bytes // sum(field.row_bytes for field in fields), 1)
        self._shards: list[PackedShard] = []
        self._open: list[_Column] = []
        self._open_rows = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._place = self._stack.enter_context(_partial(self.out))
        self._stack.push(self._end)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def write(self, columns: Mapping[str, Tensor]) -> None:
        """Append rows: for each field a CPU tensor ``(rows, *shape)`` of its dtype. Blocks for the disk."""
        tensors = [columns[field.name] for field in self.fields]
        count = len(tensors[0])
        for tensor, field in zip(tensors, self.fields, strict=True):
            assert (tensor.dtype, *tensor.shape) == (field.dtype, count, *field.shape), field.name
        done = 0
        while done < count:
            if not self._open:
                self._open_rows = 0
                # One by one: if one cannot be opened, the others get closed. A field's name may not suit a file.
                for number in range(len(self.fields)):
                    self._open.append(_Column(self._place / f"{len(self._shards):05d}-{number}.bin"))
            taken = min(count - done, self._rows_per_shard - self._open_rows)
            for column, tensor in zip(self._open, tensors, strict=True):
                column.append(tensor[done : done + taken])
            self._open_rows += taken
            self.rows += taken
            done += taken
            if self._open_rows == self._rows_per_shard:
                self._end_shard()

    def _end_shard(self) -> None:
        files = tuple(column.end() for column in self._open)
        self._shards.append(PackedShard(rows=self._open_rows, files=files))
        self._open = []

    def _end(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for column in self._open:
                column.file.close()

    def _finish(self) -> None:
        if self._open:
            self._end_shard()
        if not self.rows:
            raise SettingError(
                f"Nothing to pack into {self.out}: the input has no rows. Give data with at least one row."
            )
        index = Index(kind=self.kind, fields=self.fields, shards=tuple(self._shards))
        self._open = [_Column(self._place / INDEX)]
        self._open[0].append(torch.frombuffer(bytearray(to_json(index, self.made_with).encode()), dtype=torch.uint8))
        self._open[0].end()


class _Column:
    """Writes one file and computes its checksum."""

    def __init__(self, path: Path) -> None:
        self.path, self.bytes, self.crc32 = path, 0, 0
        with storage_errors(f"create {path}"):
            self.file: BinaryIO = path.open("xb", buffering=0)

    def append(self, rows: Tensor) -> None:
        data = rows.contiguous().view(-1).view(torch.uint8).numpy().data
        self.crc32 = zlib.crc32(data, self.crc32)
        with storage_errors(f"write {self.path}", numbers=f"{self.bytes} bytes written"):
            while data:
                written = self.file.write(data)
                self.bytes += written
                data = data[written:]

    def end(self) -> PackedFile:
        with storage_errors(f"write {self.path}", numbers=f"{self.bytes} bytes written"):
            os.fsync(self.file.fileno())
            self.file.close()
        return PackedFile(name=self.path.name, bytes=self.bytes, crc32=self.crc32)


@contextlib.contextmanager
def _partial(out: Path) -> Iterator[Path]:
    """A new directory to fill, which becomes ``out`` at the end of the block. An error in the block removes it.

    Its writer locks it; the lock ends with the process. Clears that of a killed process. Refuses if ``out`` exists or
    is being written.
    """
    if not out.name or out.name == "..":
        raise SettingError(f"{str(out)!r} is not valid for a directory. Name one that does not exist yet.")
    place = out.parent / f".{out.name}.partial"
    with contextlib.ExitStack() as stack, storage_errors(f"create {place}"):
        try:
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise SettingError(f"{out} exists already. Remove it, or name another directory.")
            out.parent.mkdir(parents=True, exist_ok=True)
            place.mkdir(exist_ok=True)
            check_no_link(place)  # its content is removed below
            lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another writer may have published between our open and our lock: then we locked its data.
            if os.stat(place).st_ino != os.fstat(lock).st_ino:  # noqa: PTH116
                raise BlockingIOError
            for left in place.iterdir():
                left.unlink()
        except (BlockingIOError, FileNotFoundError) as error:
            raise SettingError(
                f"Another process is packing into {out}. Wait for it, or name another directory."
            ) from error
        closing = stack.pop_all()
    with closing:
        try:
            yield place
            with storage_errors(f"rename {place} to {out}"):
                os.fsync(lock)  # the files are on the disk already
                place.rename(out)
                parent = os.open(out.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                closing.callback(os.close, parent)
                os.fsync(parent)
        finally:
            if place.exists() and place.stat().st_ino == os.fstat(lock).st_ino:  # it was not renamed
                shutil.rmtree(place, ignore_errors=True)
