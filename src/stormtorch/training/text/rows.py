"""The cache of prepared tokens: rows of tokens and labels in two ``.npy`` files, and the hashes of the data's files.

With packing, documents follow each other without gaps and are cut where a row ends; only the last row is padded.
Otherwise each document is a row, cut or padded. A row without trained tokens is left out: its mean loss would be zero
divided by zero.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...checkpoint.files.disk import sync_folder
from ...checkpoint.folders.folder import beside, lock
from ...core.sizes import MiB
from ...memory.disk.contained import inside, opened, parse_json, read_small, replace_file

IGNORED = -100  # the label of a token that is not trained, as in torch's cross_entropy
Ids = npt.NDArray[np.int32]

ARRAYS = ("input_ids", "labels")
_HEADER_BYTES = 128
_BUFFER_TOKENS = 1 << 18
_EXAMINED_BYTES = MiB
_DIGESTS = "digests.cache"  # not the name of a data file: the cache may be in a directory of data


class RowWriter:
    """Writes ``input_ids.npy`` and ``labels.npy`` into ``directory``; complete after ``close``."""

    def __init__(self, directory: Path, ends: ExitStack, *, sequence: int, packing: bool, padding: int) -> None:
        self._sequence, self._packing, self._padding = sequence, packing, padding
        self._files = [ends.enter_context((directory / f"{name}.npy").open("wb")) for name in ARRAYS]
        for file in self._files:
            file.write(bytes(_HEADER_BYTES))  # ``close`` writes the header: it holds the number of rows
        self._buffer = np.empty((2, max(_BUFFER_TOKENS // sequence, 1) * sequence), dtype="<i4")
        self._filled = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._sums = [0, 0]
        self.rows = self.tokens = self.trained_tokens = self.empty_rows = self.cut_documents = 0

    def add(self, ids: Ids, labels: Ids) -> None:
        """Append a document, or a piece of one."""
        if not self._packing:
            self.cut_documents += len(ids) > self._sequence
            ids, labels = ids[: self._sequence], labels[: self._sequence]
        self.tokens += len(ids)
        at = 0
        while at < len(ids):
            here = slice(self._filled, self._filled + len(ids) - at)  # ends with the buffer at the latest
            count = self._buffer[0, here].size
            self._buffer[:, here] = ids[at : at + count], labels[at : at + count]
            at += count
            self._advance(count)
        if not self._packing:
            self._pad_row()

    def close(self) -> str:
        """Write the last row and the headers, and fsync; returns a hash of all rows."""
        self._pad_row()
        self._flush()
        header = _header(self.rows, self._sequence)
        for file in self._files:
            file.seek(0)
            file.write(header)
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self._digest.update(header)
        return self._digest.hexdigest()

    def marks(self) -> dict[str, list[int]]:
        """A checksum of each file's tokens, after ``close``."""
        return {name: [total] for name, total in zip(ARRAYS, self._sums, strict=True)}

    def _pad_row(self) -> None:
        """Pad the current row."""
        missing = -self._filled % self._sequence
        self._buffer[:, self._filled : self._filled + missing] = [[self._padding], [IGNORED]]
        self._advance(missing)

    def _advance(self, count: int) -> None:
        self._filled += count
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
            data = part.data if kept.all() else np.ascontiguousarray(part[kept]).data
            file.write(data)
            self._digest.update(data)
            self._sums[number] = zlib.crc32(data, self._sums[number])
        self._filled = 0


def check_array(path: Path, *, rows: int, sequence: int, crc: int, least: int, largest: int) -> None:
    """Read the whole file; raise ValueError unless it has this checksum, and holds that many rows of such tokens."""
    with opened(path) as file:
        size = _HEADER_BYTES + rows * sequence * 4
        if os.fstat(file.fileno()).st_size != size or file.read(_HEADER_BYTES) != _header(rows, sequence):
            raise ValueError(f"{path.name} does not have the size that was written")
        found, valid = 0, True
        buffer = np.empty(_EXAMINED_BYTES // 4, dtype="<i4")
        view = buffer.data.cast("B")
        while count := file.readinto(view):  # type: ignore[attr-defined]  # of a buffered reader
            found = zlib.crc32(view[:count], found)
            tokens = buffer[: count // 4]
            valid = valid and least <= int(tokens.min()) and int(tokens.max()) <= largest
    if found != crc:
        raise ValueError(f"the checksum of {path.name} is {found:08x}, {crc:08x} was written")
    if not valid:
        raise ValueError(f"{path.name} holds numbers that are not tokens")


def _header(rows: int, sequence: int) -> bytes:
    """The header of an .npy file, version 1.0, of fixed length: numpy's length depends on the number of rows."""
    words = f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({rows}, {sequence}), }}"
    text = words.ljust(_HEADER_BYTES - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("ascii")


@contextmanager
def being_written(cache: Path, name: str) -> Iterator[Path]:
    """Yield a directory, which becomes ``cache/name`` when the block succeeds, and is removed otherwise.

    It has the name and the lock of a checkpoint's draft: the sweep of checkpoints removes what a killed process left.
    """
    directory = beside(cache / name, "writing")
    directory.mkdir()
    held = lock(directory)
    try:
        yield directory
        sync_folder(directory)
        try:
            directory.rename(cache / name)
        except OSError:
            if not (cache / name).is_dir():  # else another process made the same in the meantime
                raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if held is not None:
            os.close(held)


def digest_of(files: Sequence[Path], cache: Path) -> list[str]:
    """A hash of each file's content. Reads a file again only if its size, time or inode changed."""
    try:
        known = parse_json(read_small(inside(cache, _DIGESTS)))
    except (OSError, ValueError):
        known = {}
    known = known if isinstance(known, dict) else {}
    found: dict[str, list[object]] = {}
    digests = []
    for file in files:
        status = file.stat()
        mark = [status.st_size, status.st_mtime_ns, status.st_ino]
        before = known.get(str(file.resolve()))
        if isinstance(before, list) and before[:-1] == mark:
            digest = str(before[-1])
        else:
            with file.open("rb", buffering=0) as stream:
                digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        found[str(file.resolve())] = [*mark, digest]
        digests.append(digest)
    if any(known.get(name) != value for name, value in found.items()):
        replace_file(cache / _DIGESTS, json.dumps(known | found))
    return digests
