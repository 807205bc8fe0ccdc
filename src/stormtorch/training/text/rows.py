"""Writes rows of tokens and labels to two ``.npy`` files, one after another.

With packing, documents follow each other without gaps and are cut where a row ends; only the last row is padded.
Otherwise each document is a row, cut or padded. A row without trained tokens is left out: its mean loss would be zero
divided by zero.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from ...core.sizes import MiB
from ...memory.disk.contained import opened
from .encode import IGNORED, Ids

_HEADER_BYTES = 128
_BUFFER_TOKENS = 1 << 18
_EXAMINED_BYTES = MiB


class RowWriter:
    """Writes ``input_ids.npy`` and ``labels.npy`` into ``directory``; complete after ``close``."""

    def __init__(self, directory: Path, *, sequence: int, packing: bool, padding: int) -> None:
        self._sequence, self._packing, self._padding = sequence, packing, padding
        self._paths = [directory / f"{name}.npy" for name in ("input_ids", "labels")]
        self._files = [path.open("wb") for path in self._paths]
        for file in self._files:
            file.write(bytes(_HEADER_BYTES))  # ``close`` writes the header: it holds the number of rows
        self._capacity = max(_BUFFER_TOKENS // sequence, 1)
        self._buffer = np.empty((2, self._capacity * sequence), dtype="<i4")
        self._filled = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._sums = [0, 0]
        self.rows = self.tokens = self.trained_tokens = self.empty_rows = self.cut_documents = 0

    def add(self, ids: Ids, labels: Ids) -> None:
        """Append a document, or a piece of one."""
        if not self._packing:
            self.cut_documents += len(ids) > self._sequence
            ids, labels = ids[: self._sequence], labels[: self._sequence]
        at = 0
        while at < len(ids):
            count = min(self._buffer.shape[1] - self._filled, len(ids) - at)
            self._buffer[0, self._filled : self._filled + count] = ids[at : at + count]
            self._buffer[1, self._filled : self._filled + count] = labels[at : at + count]
            self._filled += count
            self.tokens += count
            at += count
            if self._filled == self._buffer.shape[1]:
                self._flush()
        if not self._packing:
            self._pad_row()

    def close(self) -> str:
        """Write the last row and the headers, and fsync; returns a hash of all rows."""
        self._pad_row()
        self._flush()
        for file in self._files:
            file.seek(0)
            file.write(_header(self.rows, self._sequence))
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self._digest.update(_header(self.rows, self._sequence))
        return self._digest.hexdigest()

    def marks(self) -> dict[str, list[int]]:
        """A checksum of each file's tokens, after ``close``."""
        return {path.stem: [total] for path, total in zip(self._paths, self._sums, strict=True)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()

    def _pad_row(self) -> None:
        """Pad the current row."""
        missing = -self._filled % self._sequence
        if missing:
            self._buffer[0, self._filled : self._filled + missing] = self._padding
            self._buffer[1, self._filled : self._filled + missing] = IGNORED
            self._filled += missing
        if self._filled == self._buffer.shape[1]:
            self._flush()

    def _flush(self) -> None:
        rows = self._buffer[:, : self._filled].reshape(2, -1, self._sequence)
        trained = (rows[1, :, 1:] != IGNORED).sum(axis=1)  # the first token of a row is never predicted
        kept = trained > 0
        self.empty_rows += int((~kept).sum())
        self.trained_tokens += int(trained.sum())
        self.rows += int(kept.sum())
        for number, (file, part) in enumerate(zip(self._files, rows, strict=True)):
            data = np.ascontiguousarray(part[kept])
            file.write(data.data)
            self._digest.update(data.data)
            self._sums[number] = zlib.crc32(data.data, self._sums[number])
        self._filled = 0


class Found(NamedTuple):
    """A token file's checksum, and its smallest and largest token."""

    crc: int
    least: int
    largest: int


def examine(path: Path, *, rows: int, sequence: int) -> Found | None:
    """Read the whole file; None if its size or its header is not that of ``rows`` rows. Blocks."""
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size != array_bytes(rows, sequence):
            return None
        if file.read(_HEADER_BYTES) != _header(rows, sequence):
            return None
        crc, least, largest = 0, 0, 0
        buffer = np.empty(_EXAMINED_BYTES // 4, dtype="<i4")
        view = buffer.data.cast("B")
        while count := file.readinto(view):  # type: ignore[attr-defined]  # of a buffered reader
            crc = zlib.crc32(view[:count], crc)
            tokens = buffer[: count // 4]
            least, largest = min(least, int(tokens.min())), max(largest, int(tokens.max()))
        return Found(crc, least, largest)


def array_bytes(rows: int, sequence: int) -> int:
    """The size of a complete file."""
    return _HEADER_BYTES + rows * sequence * 4


def _header(rows: int, sequence: int) -> bytes:
    """The header of an .npy file, version 1.0, of fixed length: numpy's length depends on the number of rows."""
    words = f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({rows}, {sequence}), }}"
    text = words.ljust(_HEADER_BYTES - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("ascii")
