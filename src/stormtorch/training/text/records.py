"""Reads records from data files, each with its file and line for errors.

JSON lines hold one object each. A plain text file is one document of any length; it is read in pieces that end with a
line, because a whole book in RAM would break the bound on memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import SettingError, StorageError
from ...data.formats.paths import file_size, natural_order
from ...data.formats.text_lines import JSON_LINES, Progress, decode, lines, parse_object

_TABLES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}  # by the names of `datasets`
PLAIN_TEXT = frozenset({".txt", ".text", ".md"})
_PIECE_CHARACTERS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Record:
    """An object of a JSON-lines file, or a piece of a plain text. ``last``: no other piece of the document follows."""

    place: str
    content: dict[str, Any] | str
    first: bool = True
    last: bool = True


def data_files(paths: Sequence[Path | str]) -> list[Path]:
    """The files that ``paths`` mean, in order: themselves, or a directory's JSON lines and text."""
    if not paths:
        raise SettingError("No data was named. Name a file of JSON lines or text: --data data.jsonl.")
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            kinds = JSON_LINES | PLAIN_TEXT - {".md"}  # a README beside the data is data only if the user names it
            files_there = (file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
            inside = sorted((file for file in files_there if file.suffix.lower() in kinds), key=natural_order)
            if not inside:
                tables = sorted(file for file in path.iterdir() if file.suffix.lower() in _TABLES)
                raise SettingError(f"{path} holds no data. Accepted: {_accepted()}.{_conversion(tables)}")
            files += inside
        elif not path.exists():
            raise SettingError(f"{path} does not exist. Name a file of JSON lines or text, or a directory of such.")
        elif path.suffix.lower() not in JSON_LINES | PLAIN_TEXT:
            raise SettingError(
                f"{path} is neither JSON lines nor text by its name. Accepted: {_accepted()}.{_conversion([path])}"
            )
        else:
            files.append(path)
    for file in files:
        if not file_size(file):
            raise StorageError(f"{file} is empty. Write it again, or leave it out.")
    return files


def is_plain_text(path: Path) -> bool:
    return path.suffix.lower() in PLAIN_TEXT


def records(path: Path, progress: Progress | None = None) -> Iterator[Record]:
    """The records of ``path``, in order. Skips empty lines."""
    return _pieces(path, progress) if is_plain_text(path) else _objects(path, progress)


def _objects(path: Path, progress: Progress | None) -> Iterator[Record]:
    for number, line in _lines(path, progress):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        if line.lstrip().startswith("["):  # perhaps an array over several lines
            raise StorageError(
                f"{place}: a JSON array, not an object. Write one object in each line: jq -c '.[]' {path} > data.jsonl."
            )
        try:
            found = parse_object(line)
        except ValueError as error:
            raise StorageError(f"{place}: {error}. Write one JSON object in each line.") from error
        yield Record(place=place, content=found)


def _pieces(path: Path, progress: Progress | None) -> Iterator[Record]:
    """A piece ends when a line follows that it has no room for: the last one is known as such."""
    piece: list[str] = []
    size, first_line = 0, 1
    for number, line in _lines(path, progress):
        if size >= _PIECE_CHARACTERS:
            place = f"{path}, from line {first_line}"
            yield Record(place=place, content="".join(piece), first=first_line == 1, last=False)
            piece, size, first_line = [], 0, number
        piece.append(line)
        size += len(line)
    if piece:
        yield Record(place=f"{path}, from line {first_line}", content="".join(piece), first=first_line == 1)


def _lines(path: Path, progress: Progress | None) -> Iterator[tuple[int, str]]:
    for number, line in lines(path, progress):
        try:
            text = decode(line)
        except ValueError as error:
            raise StorageError(f"{path}, line {number}: {error}. Convert it to UTF-8.") from error
        yield number, text


def _accepted() -> str:
    return (
        f"{', '.join(sorted(JSON_LINES))} (one object in each line), {', '.join(sorted(PLAIN_TEXT))}, or a folder that "
        "storm data pack made"
    )


def _conversion(files: Sequence[Path]) -> str:
    """A command that converts a table to JSON lines."""
    if not files or files[0].suffix.lower() not in _TABLES:
        return ""
    file = files[0]
    columns = ", sep='\\t'" if file.suffix.lower() == ".tsv" else ""
    return (
        f" Convert it: python -c \"from datasets import load_dataset as l; l('{_TABLES[file.suffix.lower()]}', "
        f"data_files='{file}'{columns})['train'].to_json('data.jsonl')\"."
    )
