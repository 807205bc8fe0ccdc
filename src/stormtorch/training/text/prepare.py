"""``prepare``: files of text or conversations to two arrays of tokens that ``storm.DataLoader`` reads.

Done once: the arrays lie in ``cache`` under a name made of what they were made from (the files' contents, the
tokenizer, the settings), and are taken from there the next time. They are written beside and renamed when complete, so
whatever ends the process leaves either all of them or nothing that would be used; what a dead process has left behind
is removed by the next. The memory it takes is that of a batch of documents, whatever the size of the files.

``Prepared.fingerprint`` is a hash of the arrays themselves: a run that is resumed asks whether it reads the same
tokens, not whether the file was touched or the tokenizer saved anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...core.errors import SettingError, StorageError, StormError
from ...data.paths import whole_number
from ...memory.contained import check_no_link, inside, parse_json, read_small
from ...memory.file_calls import storage_error
from ..reason import reason
from .cache import being_written, digest_of, sweep
from .documents import Document, Reading, settle
from .encode import IGNORED, Encoder, beyond_vocabulary
from .records import Progress, data_files, is_plain_text, records
from .rows import RowWriter, examine

_VERSION = 1  # of what is written: another number makes all caches anew


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Rows of tokens on disk. ``trained_tokens`` counts the labels, ``empty_rows`` were left out for having none."""

    arrays: dict[str, Path]
    sequence: int
    rows: int
    tokens: int
    trained_tokens: int
    documents: int
    cut_documents: int  # not packed, and longer than a row
    empty_rows: int
    largest_token: int
    format: str
    fingerprint: str
    reused: bool

    def __str__(self) -> str:
        cut = f", {self.cut_documents} of them cut" if self.cut_documents else ""
        empty = f", {self.empty_rows} without anything to learn left out" if self.empty_rows else ""
        return (
            f"{self.documents} documents ({self.format}){cut}: {self.tokens} tokens, {self.trained_tokens} to learn, "
            f"in {self.rows} rows of {self.sequence}{empty}"
        )


def prepare(
    paths: Sequence[Path | str],
    tokenizer: Any,
    *,
    sequence: int,
    cache: Path,
    packing: bool = True,
    format: str = "auto",
    completions_only: bool | None = None,
    text_field: str | None = None,
    vocabulary: int | None = None,
    progress: Progress | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Prepared:
    """Blocks until the arrays are there. Writes under ``cache``, nowhere else.

    ``tokenizer`` is one of transformers, or None for data that holds tokens. ``completions_only`` None: for what has
    prompts. ``vocabulary`` is the model's: a token beyond it is refused. ``progress`` is told the bytes of input that
    were read, if any are. Arrays that are there already are read and compared with their sums; ``warn`` is told of
    those that are damaged, which are made again.
    """
    sequence = whole_number("--sequence", sequence, 2)
    files = data_files(paths)
    if not packing and any(map(is_plain_text, files)):
        raise SettingError(
            "--no-packing takes the first row of each document, and a text file is one document. Give JSON lines, "
            "or pack."
        )
    reading = settle(
        _first(files), format=format, completions_only=completions_only, text_field=text_field, tokenizer=tokenizer
    )
    encoder = Encoder(tokenizer, vocabulary=vocabulary)
    try:
        check_no_link(cache)
        cache.mkdir(parents=True, exist_ok=True)
        sweep(cache)
        key = _key(files, cache, reading, encoder, sequence=sequence, packing=packing)
        found = _found(cache / key, padding=encoder.padding, warn=warn)
        if found is None:
            _write(cache, key, files, reading, encoder, sequence=sequence, packing=packing, progress=progress)
            found = _found(cache / key, padding=encoder.padding, reused=False)
    except OSError as error:
        if isinstance(error, StormError):
            raise
        raise storage_error(f"write tokens to {cache}", error) from error
    if found is None:
        raise StorageError(f"The tokens in {cache / key} were removed while they were in use. Start again.")
    if vocabulary is not None and found.largest_token >= vocabulary:
        raise beyond_vocabulary(str(files[0]), found.largest_token, vocabulary, tokenizer)
    return found


def _first(files: Sequence[Path]) -> Any:
    for file in files:
        for record in records(file):
            return record
    raise StorageError(f"{files[0]} holds no document, only empty lines. Give it some.")


def _documents(files: Sequence[Path], reading: Reading, progress: Progress | None) -> Iterator[Document]:
    for file in files:
        for record in records(file, progress):
            yield reading.document(record)


def _key(
    files: Sequence[Path], cache: Path, reading: Reading, encoder: Encoder, *, sequence: int, packing: bool
) -> str:
    made_from = {
        "version": _VERSION,
        "files": digest_of(files, cache),
        "tokenizer": encoder.identity(),
        "format": reading.format,
        "completions_only": reading.completions_only,
        "text_field": reading.text_field,
        "sequence": sequence,
        "packing": packing,
    }
    return hashlib.blake2b(json.dumps(made_from, sort_keys=True).encode(), digest_size=12).hexdigest()


def _write(
    cache: Path,
    key: str,
    files: Sequence[Path],
    reading: Reading,
    encoder: Encoder,
    *,
    sequence: int,
    packing: bool,
    progress: Progress | None,
) -> None:
    count = 0
    with being_written(cache, key) as directory:
        with RowWriter(directory, sequence=sequence, packing=packing, padding=encoder.padding) as writer:
            for document, ids, labels in encoder.encode(_documents(files, reading, progress)):
                writer.add(ids, labels)
                count += document.last
            fingerprint = writer.close()
        if not writer.rows:
            raise SettingError(
                f"{files[0]}: none of {count} documents with {writer.tokens} tokens has anything to learn within "
                f"--sequence {sequence}. Prompts may be longer than that, or documents of one token: raise it."
            )
        made = Prepared(
            arrays={},
            sequence=sequence,
            rows=writer.rows,
            tokens=writer.tokens,
            trained_tokens=writer.trained_tokens,
            documents=count,
            cut_documents=writer.cut_documents,
            empty_rows=writer.empty_rows,
            largest_token=encoder.largest,
            format=reading.format,
            fingerprint=fingerprint,
            reused=True,
        )
        facts = {name: value for name, value in asdict(made).items() if name not in ("arrays", "reused")}
        facts["marks"] = writer.marks()
        facts["sum"] = _sum(facts)
        with (directory / "prepared.json").open("w") as file:
            json.dump(facts, file)
            file.flush()
            os.fsync(file.fileno())


def _found(
    directory: Path, *, padding: int, reused: bool = True, warn: Callable[[str], None] = lambda _: None
) -> Prepared | None:
    """What lies there, if it is complete and as it was written; what is not is removed."""
    if not os.path.lexists(directory):
        return None
    try:
        inside(directory.parent, directory.name)
        facts = parse_json(read_small(inside(directory, "prepared.json")))
        marks = facts.get("marks", {})  # older ones have no marks, or no sum
        if facts.pop("sum", None) not in (None, _sum(facts)):
            raise ValueError("prepared.json is not as it was written")
        if not isinstance(marks, dict):
            raise ValueError("prepared.json holds no sums")
        facts.pop("marks", None)
        arrays = {name: inside(directory, f"{name}.npy") for name in ("input_ids", "labels")}
        found = Prepared(arrays=arrays, reused=reused, **facts)
        _check_arrays(found, marks, padding)
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warn(f"The tokens in {directory} cannot be used ({reason(error)}). They are made again.")
    if directory.is_symlink():
        directory.unlink()
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return None


def _sum(facts: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _check_arrays(found: Prepared, marks: Mapping[str, Sequence[int]], padding: int) -> None:
    """Raise ValueError unless both files hold what was written, and tokens that the facts know."""
    with ThreadPoolExecutor(len(found.arrays)) as pool:  # numpy, zlib and the disk need no lock of Python's
        held = pool.map(lambda path: examine(path, rows=found.rows, sequence=found.sequence), found.arrays.values())
        for (name, path), what in zip(found.arrays.items(), held, strict=True):
            if what is None:
                raise ValueError(f"{path.name} is not of the size that it was written in")
            if name in marks and what.crc != marks[name][0]:
                raise ValueError(f"the checksum of {path.name} is {what.crc:08x}, {marks[name][0]:08x} was written")
            least = 0 if name == "input_ids" else IGNORED
            if what.least < least or what.largest > max(found.largest_token, padding):
                raise ValueError(f"{path.name} holds numbers that are no tokens")
