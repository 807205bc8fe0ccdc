"""Folders of ``storm data pack`` as input of ``prepare``: tokens and labels.

Packed tokens are cut like text: one after another, across shards, to rows of ``--sequence``. Packed rows of
``input_ids`` (and ``labels``) remain rows. Every byte that is read is verified with the index's checksums. A folder may
be untrusted: names or links that lead out of it are refused.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.errors import SettingError, StorageError
from ...data.formats.dtypes import INTEGERS, name_of
from ...data.formats.plain.packed import Index, PackedFile, is_packed, read_index
from ...data.formats.text_lines import Progress
from ...data.source import Field
from ...memory.disk.calls import storage_errors
from ...memory.disk.contained import inside, opened
from .rows import IGNORED, Ids

_PIECE_TOKENS = 1 << 20
_TOKEN_LIMIT = 1 << 31  # rows hold tokens in 32 bits


def packed_folders(paths: Sequence[Path | str]) -> list[Path]:
    """``paths`` if all are packed folders, [] if none is; raises SettingError for a mixture."""
    packed = [path for path in map(Path, paths) if is_packed(path)]
    if packed and len(packed) < len(paths):
        other = next(path for path in map(Path, paths) if path not in packed)
        raise SettingError(f"{packed[0]} is packed and {other} is not. Name one kind, or pack {other} as well.")
    return packed


class Packed:
    """``padding``: fills the last row. ``vocabulary``: the model's; refuses tokens beyond it."""

    format = "packed"

    def __init__(
        self,
        folders: Sequence[Path],
        padding: int,
        sequence: int,
        vocabulary: int | None,
        completions_only: bool | None,
    ) -> None:
        self._folders = [(folder, read_index(folder)) for folder in folders]
        self._vocabulary, self.padding = vocabulary, padding
        self._masked = completions_only is not False
        self.place, self.largest = str(folders[0]), -1
        for folder, index in self._folders:
            _check_columns(folder, index, sequence)
            if completions_only and not {"loss_mask", "labels"} & {field.name for field in index.fields}:
                raise SettingError(
                    f"--completions-only: {folder} does not mark prompts. Leave it out, or pack it again with "
                    "--prompt-field."
                )

    def made_from(self) -> dict[str, Any]:
        """Everything that decides the rows, besides their length."""
        sums = [
            [field.name, name_of(field.dtype), file.bytes, file.crc32]
            for _, files in self._shards()
            for field, file in files
        ]
        return {"packed": sums, "padding": self.padding}

    def encoded(self, progress: Progress | None) -> Iterator[tuple[Ids, Ids, bool]]:
        """Tokens and labels, in order. Ends of documents are not known, nor needed to cut rows."""
        for folder, files in self._shards():
            for columns in _pieces(folder, files, progress):
                labels = ids = self._checked(folder, columns[0])
                if len(columns) == 2 and files[1][0].name == "loss_mask":
                    labels = np.where(columns[1] != 0, ids, np.int32(IGNORED))
                elif len(columns) == 2:
                    self._checked(folder, columns[1][columns[1] != IGNORED])
                    labels = columns[1].astype(np.int32)
                yield ids, labels, False

    def beyond_vocabulary(self, token: int) -> SettingError:
        return SettingError(
            f"{self.place}: token {token} is beyond the model's vocabulary of {self._vocabulary}. It was packed with "
            "another tokenizer: pack the text again with the model's own (storm data pack --tokenizer MODEL)."
        )

    def _shards(self) -> Iterator[tuple[Path, list[tuple[Field, PackedFile]]]]:
        """Each shard's folder, with the columns to read: the tokens, and the labels or the mask."""
        for folder, index in self._folders:
            names = [field.name for field in index.fields]
            second = [name for name in ("labels", "loss_mask") if name in names and (self._masked or name == "labels")]
            chosen = [names.index("tokens" if index.kind == "tokens" else "input_ids"), *map(names.index, second)]
            for shard in index.shards:
                if shard.rows:
                    yield folder, [(index.fields[at], shard.files[at]) for at in chosen]

    def _checked(self, folder: Path, found: npt.NDArray[Any]) -> Ids:
        least, largest = int(found.min(initial=0)), int(found.max(initial=0))
        self.largest = max(self.largest, largest)
        if least < 0:
            raise StorageError(f"{folder}: token {least} is below 0. Pack it again.")
        if self._vocabulary is not None and largest >= self._vocabulary:
            raise self.beyond_vocabulary(largest)
        if largest >= _TOKEN_LIMIT:
            raise StorageError(f"{folder}: token {largest} does not fit in 32 bits. Pack it again.")
        return found.astype(np.int32)


def _check_columns(folder: Path, index: Index, sequence: int) -> None:
    """Refuse columns that are not tokens, and rows of another length."""
    found = {field.name: field for field in index.fields}
    if index.kind == "tokens":
        if "tokens" not in found:
            raise StorageError(f"{folder} holds packed tokens, and no column is named tokens. Copy or pack it again.")
        for name in found.keys() & {"tokens", "labels", "loss_mask"}:
            kind = name_of(found[name].dtype)
            if kind not in INTEGERS and (name, kind) != ("loss_mask", "bool"):
                raise StorageError(f"{folder}: {name!r} is {kind}. Accepted: integers. Copy or pack it again.")
        return
    other = sorted(found.keys() - {"input_ids", "labels"})
    if "input_ids" not in found or other:
        raise SettingError(
            f"{folder} holds rows of {', '.join(map(repr, found))}. Accepted: packed tokens (storm data pack TEXT "
            "--tokenizer MODEL), or rows of input_ids and optionally labels (--columns input_ids labels)."
        )
    for name, field in found.items():
        if name_of(field.dtype) not in INTEGERS or len(field.shape) != 1:
            raise SettingError(
                f"{folder}: {name!r} is {name_of(field.dtype)} of shape {list(field.shape)}. Accepted: integers, one "
                "row of tokens in each row."
            )
        if field.shape != (sequence,):
            raise SettingError(
                f"{folder} holds rows of {field.shape[0]} tokens, and --sequence is {sequence}. Give --sequence "
                f"{field.shape[0]}, or pack the text as tokens, which can be cut to any length."
            )


def _pieces(
    folder: Path, files: Sequence[tuple[Field, PackedFile]], progress: Progress | None
) -> Iterator[list[npt.NDArray[Any]]]:
    """The columns of a shard, some tokens at a time; raises StorageError at the end of a damaged file."""
    dtypes = [np.dtype(name_of(field.dtype)).newbyteorder("<") for field, _ in files]
    sums = [0] * len(files)
    left = files[0][1].bytes // dtypes[0].itemsize
    with storage_errors(f"read {folder}"), contextlib.ExitStack() as stack:
        streams = [stack.enter_context(opened(inside(folder, file.name))) for _, file in files]
        while left:
            count = min(left, _PIECE_TOKENS)
            columns = []
            for at, (stream, dtype) in enumerate(zip(streams, dtypes, strict=True)):
                data = stream.read(count * dtype.itemsize)
                if len(data) < count * dtype.itemsize:
                    raise StorageError(f"{folder / files[at][1].name} ends early. Copy or pack it again.")
                sums[at] = zlib.crc32(data, sums[at])
                columns.append(np.frombuffer(data, dtype=dtype))
                if progress is not None:
                    progress(len(data))
            left -= count
            yield columns
    for (_, file), found in zip(files, sums, strict=True):
        if found != file.crc32:
            raise StorageError(
                f"{folder / file.name} is damaged: checksum {found:08x}, the index says {file.crc32:08x}. Copy or "
                "pack it again."
            )
