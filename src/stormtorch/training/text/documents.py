"""Reads documents from data files, each with its file and line for errors: texts, and the parts of them to train on.

JSON lines hold one object each, and the first tells the format: ``{"text": ...}``, ``{"messages": [...]}``, or
``{"prompt": ..., "completion": ...}``. A text may also be a list of token ids. A plain text file is one document of any
length; it is read in pieces that end with a line, because a whole book in RAM would break the bound on memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...core.errors import SettingError, StorageError
from ...data.formats.paths import file_size, natural_order
from ...data.formats.text_lines import JSON_LINES, Progress, decode, lines, parse_object
from .chat import ChatTemplate

Span = tuple[int, int]
_TABLES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}  # by the names of `datasets`
PLAIN_TEXT = frozenset({".txt", ".text", ".md"})
_PIECE_CHARACTERS = 1 << 20


class Record(NamedTuple):
    """An object of a JSON-lines file."""

    place: str
    content: dict[str, Any]


@dataclass(frozen=True)
class Document:
    """``learn``: the spans to train on, in characters, or in tokens if ``content`` is tokens; None: everything.

    ``opening``: add the special tokens that the tokenizer puts around a text. ``ending``: add the end token. ``last``:
    no other piece of the same document follows.
    """

    place: str
    content: str | Sequence[int]
    learn: Sequence[Span] | None
    opening: bool = True
    ending: bool = True
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
                raise SettingError(f"{path} holds no data. Accepted: {_accepted()}.{_of_table(tables)}")
            files += inside
        elif not path.exists():
            raise SettingError(f"{path} does not exist. Name a file of JSON lines or text, or a directory of such.")
        elif path.suffix.lower() not in JSON_LINES | PLAIN_TEXT:
            raise SettingError(
                f"{path} is neither JSON lines nor text by its name. Accepted: {_accepted()}.{_of_table([path])}"
            )
        else:
            files.append(path)
    for file in files:
        if not file_size(file):
            raise StorageError(f"{file} is empty. Write it again, or leave it out.")
    return files


def is_plain_text(path: Path) -> bool:
    return path.suffix.lower() in PLAIN_TEXT


def records(path: Path, progress: Progress | None = None) -> Iterator[Record | Document]:
    """The objects of a JSON-lines file, without empty lines, or the pieces of a plain text."""
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
            yield Record(place, parse_object(line))
        except ValueError as error:
            raise StorageError(f"{place}: {error}. Write one JSON object in each line.") from error


def _pieces(path: Path, progress: Progress | None) -> Iterator[Document]:
    """A piece ends when a line follows that it has no room for: the last one is known as such."""
    piece: list[str] = []
    size, first_line = 0, 1
    for number, line in _lines(path, progress):
        if size >= _PIECE_CHARACTERS:
            yield _piece(path, piece, first_line, last=False)
            piece, size, first_line = [], 0, number
        piece.append(line)
        size += len(line)
    if piece:
        yield _piece(path, piece, first_line, last=True)


def _piece(path: Path, lines: list[str], first_line: int, *, last: bool) -> Document:
    place = f"{path}, from line {first_line}"
    return Document(place, "".join(lines), None, opening=first_line == 1, ending=last, last=last)


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


def _of_table(files: Sequence[Path]) -> str:
    """A command that converts a table to JSON lines."""
    if not files or files[0].suffix.lower() not in _TABLES:
        return ""
    file = files[0]
    columns = ", sep='\\t'" if file.suffix.lower() == ".tsv" else ""
    return (
        f" Convert it: python -c \"from datasets import load_dataset as l; l('{_TABLES[file.suffix.lower()]}', "
        f"data_files='{file}'{columns})['train'].to_json('data.jsonl')\"."
    )


@dataclass(frozen=True)
class Reading:
    """How to read records: the format, and the field of the text."""

    format: Literal["text", "chat", "completion"]
    completions_only: bool
    text_field: str
    template: ChatTemplate | None = None  # for chats

    def document(self, record: Record | Document) -> Document:
        """Raises StorageError, with the place of the record, if it does not have the format."""
        if isinstance(record, Document):
            if self.format != "text":
                raise StorageError(
                    f"{record.place}: plain text, but the data has format {self.format!r}. Give JSON lines, "
                    "or train on text alone: --format text."
                )
            return record
        place, found = record
        if self.format == "text":
            return Document(place, _content(record, self.text_field), None)
        if self.format == "completion":
            prompt, completion = _content(record, "prompt", empty=True), _content(record, "completion")
            if type(prompt) is not type(completion):
                raise StorageError(f"{place}: one of 'prompt' and 'completion' is text, the other tokens.")
            both = prompt + completion
            return Document(place, both, [(len(prompt), len(both))] if self.completions_only else None)
        if self.text_field not in found:
            raise _missing(record, self.text_field)
        assert self.template is not None
        text, spans = self.template.render(
            place, found[self.text_field], tools=found.get("tools"), spans=self.completions_only
        )
        # The template begins and ends a conversation. Other special tokens would not be there at inference.
        return Document(place, text, spans, opening=False, ending=False)


def choose_reading(
    files: Sequence[Path], format: str, completions_only: bool | None, text_field: str | None, tokenizer: Any
) -> Reading:
    """How to read ``files``, by their first record. Raises SettingError if the settings contradict it."""
    first = next((record for file in files for record in records(file)), None)
    if first is None:
        raise StorageError(f"{files[0]} holds no document, only empty lines. Give it some.")
    kind = _detected(first, text_field) if format == "auto" else format
    if kind == "text" and completions_only:
        raise SettingError(
            "--completions-only does not apply to text, which has no prompts. Leave it out, or give records with "
            "'prompt' and 'completion', or 'messages'."
        )
    only = kind != "text" if completions_only is None else completions_only
    if kind == "chat":
        template = ChatTemplate(tokenizer)
        return Reading("chat", only, text_field or "messages", template)
    if kind == "completion":
        return Reading("completion", only, "")
    return Reading("text", only, text_field or "text")


def _detected(first: Record | Document, text_field: str | None) -> str:
    if isinstance(first, Document):
        return "text"
    found = first.content
    if text_field is not None and text_field in found:
        value = found[text_field]
        return "chat" if isinstance(value, list) and any(isinstance(item, dict) for item in value) else "text"
    if text_field is None:
        if "messages" in found:
            return "chat"
        if "prompt" in found and "completion" in found:
            return "completion"
        if "text" in found:
            return "text"
    raise _missing(first, text_field or "text")


def _content(record: Record, name: str, *, empty: bool = False) -> Any:
    """A text, or a list of token ids."""
    value = record.content.get(name)
    if isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value)):
        if not value and not empty:
            raise StorageError(f"{record.place}: field {name!r} is empty. Fill it, or remove the line.")
        return value
    if name not in record.content:
        raise _missing(record, name)
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        raise StorageError(
            f"{record.place}: field {name!r} is a list of messages, not text. Put all turns of the conversation "
            'into one list: {"messages": [...]}.'
        )
    raise StorageError(
        f"{record.place}: field {name!r} is of type {type(value).__name__}, neither text nor a list of token ids. "
        "Correct it."
    )


def _missing(record: Record, name: str) -> StorageError:
    there = ", ".join(map(repr, list(record.content)[:8])) or "nothing"
    return StorageError(
        f"{record.place}: no field {name!r}, there is {there}. Accepted: 'text', 'prompt' with 'completion', or "
        f"'messages'. Give another name of the text's field with --text-field.{_conversion(record.content)}"
    )


def _conversion(found: dict[str, Any]) -> str:
    """A command that converts rows of other well-known forms."""
    if {"instruction", "output"} <= found.keys():  # Alpaca's
        text = '.instruction + (if (.input // "") == "" then "" else "\\n\\n" + .input end) + "\\n\\n"'
        return f" Convert it: jq -c '{{prompt: ({text}), completion: .output}}' FILE > data.jsonl."
    if "conversations" in found:  # ShareGPT's
        role = '({human: "user", gpt: "assistant"}[.from] // .from)'
        return (
            f" Convert it: jq -c '{{messages: [.conversations[] | {{role: {role}, content: .value}}]}}' FILE "
            "> data.jsonl."
        )
    return ""
