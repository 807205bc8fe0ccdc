"""Reads documents from files: one text or JSON object in each line, or a column of Arrow or Parquet.

A document is a text, or a list of token ids if the file holds those. At most one line, or one record batch, is in
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import SettingError, StorageError
from ..formats.paths import file_size, files_meant, read_at
from ..formats.tables.arrow import arrow_errors, pyarrow, read_batches
from ..formats.tables.hf_datasets import saved_files
from ..formats.text_lines import JSON_LINES, decode, lines, parse_object

_BATCH_ROWS = 1024
Content = str | Sequence[int]
_TABLES = frozenset({".parquet", ".arrow"})
TEXTS = JSON_LINES | {".txt", ".text", ".gz"}
_ARCHIVES = {b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


def document_files(path: Path) -> list[Path]:
    """The files with documents that ``path`` means: itself, or those of a directory.

    A directory with Arrow or Parquet files means those alone, any other its text and JSON lines. So notes beside the
    data, such as a README.md, are documents only if the user names them.
    """
    if not path.is_dir():
        return files_meant(path)
    saved = saved_files(path)
    if saved is not None:
        return saved[0]
    files = files_meant(path, notes=True)
    for suffixes in (_TABLES, TEXTS):
        chosen = [file for file in files if file.suffix.lower() in suffixes]
        if chosen:
            return chosen
    raise SettingError(
        f"{path} holds no documents ({len(files)} other files, such as {files[0].name}). Accepted: Arrow, Parquet, "
        f"{', '.join(sorted(TEXTS))}."
    )


@dataclass(frozen=True, kw_only=True)
class Document:
    """``content``: trained on; ``prompt``: before it, masked. Texts, or token ids."""

    content: Content
    prompt: Content | None = None


@dataclass(kw_only=True)
class DocumentReader:
    """Reads documents from files.

    ``text_field`` and ``prompt_field``: keys of JSON objects, or columns; plain text has neither. ``skip_bad_lines``:
    skip invalid lines, and count them in ``bad_lines``.
    """

    text_field: str = "text"
    prompt_field: str | None = None
    skip_bad_lines: bool = False
    progress: Callable[[int], None] = lambda _: None  # called with the bytes of the file that each piece took
    bad_lines: int = 0

    def read(self, path: Path) -> Iterator[Document]:
        """The documents of one file, in order. Skips empty lines."""
        file_size(path)
        head = read_at(path, 0, 6)
        found: Iterator[tuple[int, bytes | dict[str, Any]]]
        if head.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
            unit, as_json = "row", False
            found = self._rows(path, parquet=head.startswith(b"PAR1"))
        else:
            for magic, name in _ARCHIVES.items():
                if head.startswith(magic):
                    raise SettingError(f"{path} is compressed with {name}. Decompress it first, or use gzip.")
            suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
            unit, as_json = "line", bool(suffixes) and suffixes[-1] in JSON_LINES
            if self.prompt_field is not None and not as_json:
                raise SettingError(f"{path} is plain text and has no field {self.prompt_field!r}. Give JSON lines.")
            found = lines(path, self.progress, gzipped=head.startswith(b"\x1f\x8b"))
        for number, content in found:
            try:
                document = self._document(content, as_json=as_json)
            except ValueError as error:
                if not self.skip_bad_lines:
                    raise StorageError(
                        f"{path}, {unit} {number}: {error}. Correct it, or skip such {unit}s with --skip-bad-lines."
                    ) from error
                self.bad_lines += 1
                continue
            if document is not None:
                yield document

    def _document(self, found: bytes | dict[str, Any], *, as_json: bool) -> Document | None:
        """The document of a line or a row; None for an empty one. Raises ValueError with the reason."""
        if isinstance(found, bytes):
            text = decode(found)
            if not text.strip():
                return None
            if not as_json:
                return Document(content=text.rstrip("\r\n"))
            found = parse_object(text)
        content = _content(found, self.text_field)
        prompt = None if self.prompt_field is None else _content(found, self.prompt_field)
        return Document(content=content, prompt=prompt) if content or prompt else None

    def _rows(self, path: Path, *, parquet: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        """The rows of a table with their numbers."""
        names = [self.text_field] + ([] if self.prompt_field is None else [self.prompt_field])
        row = 0
        for batch, taken in _batches(path, names, parquet=parquet):
            missing = [name for name in names if name not in batch.schema.names]
            if missing:
                raise SettingError(
                    f"{path} has columns {', '.join(batch.schema.names)} and no {missing[0]!r}. "
                    "Name the column with the text: --text-field."
                )
            yield from enumerate(batch.select(names).to_pylist(), row)
            row += batch.num_rows
            self.progress(taken)


def _batches(path: Path, names: Sequence[str], *, parquet: bool) -> Iterator[tuple[Any, int]]:
    """Record batches, each with the bytes of the file that it took."""
    if parquet:
        with arrow_errors(str(path), "Parquet"), pyarrow(".parquet").ParquetFile(path) as file:
            present = [name for name in names if name in file.schema_arrow.names]
            chosen = present if len(present) == len(names) else None  # all, for the caller's error to list
            each = path.stat().st_size / max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=chosen):
                yield batch, int(each * batch.num_rows)
    else:
        for batch in read_batches(path):
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                part = batch.slice(start, _BATCH_ROWS)
                yield part, part.nbytes


def _content(found: dict[str, Any], name: str) -> Content:
    content = found.get(name)
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(type(token) is int for token in content):
        return content
    if name not in found:
        raise ValueError(f"no field {name!r} among {', '.join(map(repr, list(found)[:8])) or 'none'}")
    raise ValueError(f"field {name!r} is of type {type(content).__name__}, neither text nor a list of whole numbers")
