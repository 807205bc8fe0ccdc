"""``prepare`` turns text, conversations or packed folders into two arrays of tokens for ``storm.DataLoader``.

It does so once: the arrays are cached under a hash of their origin (the files' contents, the tokenizer, the settings).
They are written under another name and renamed when complete, so a crash leaves nothing that a later run would use; the
next run removes leftovers. The memory is that of a batch of documents, for files of any size.

``Prepared.fingerprint`` is a hash of the arrays: a resumed run checks that it reads the same tokens, not whether a file
was touched or the tokenizer saved again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoint.folders.folder import sweep
from ...core.errors import SettingError, StorageError
from ...data.formats.paths import file_size, whole_number
from ...data.formats.plain.packed import read_index
from ...data.formats.text_lines import Progress
from ...memory.disk.calls import storage_errors
from ...memory.disk.contained import check_no_link, inside, parse_json, read_small
from ..errors import reason
from .documents import choose_reading, data_files, is_plain_text
from .encode import Texts, padding_token
from .packed import Packed, packed_folders
from .rows import ARRAYS, IGNORED, RowWriter, being_written, check_array

_VERSION = 1  # of the format: a change invalidates all caches
_COUNTS = ("rows", "tokens", "trained_tokens", "cut_documents", "empty_rows")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Rows of tokens on disk. ``trained_tokens``: the number of labels. ``empty_rows``: left out, without labels."""

    arrays: dict[str, Path]
    sequence: int
    rows: int
    tokens: int
    trained_tokens: int
    documents: int
    cut_documents: int  # longer than a row, without packing
    empty_rows: int
    largest_token: int
    format: str
    fingerprint: str
    reused: bool

    def __str__(self) -> str:
        empty = f"; left out {self.empty_rows} rows without trained tokens" if self.empty_rows else ""
        cut = f", {self.cut_documents} of them cut" if self.cut_documents else ""
        origin = "packed" if self.format == "packed" else f"{self.documents} documents ({self.format}){cut}"
        return (
            f"{origin}: {self.tokens} tokens, {self.trained_tokens} of them trained, in {self.rows} rows of "
            f"{self.sequence}{empty}"
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
    """Prepare the arrays, or find them in ``cache``. Writes nowhere else. Blocks.

    ``tokenizer``: one of transformers, or None for data that holds tokens. ``completions_only``: None for data with
    prompts. ``vocabulary``: the model's; refuses tokens beyond it. ``progress``: called with the bytes of input that
    were read. Verifies the checksums of cached arrays; calls ``warn`` for damaged ones, and makes them again.
    """
    sequence = whole_number("--sequence", sequence, 2)
    source: Texts | Packed
    if folders := packed_folders(paths):
        of_text = {"--no-packing": not packing, "--format": format != "auto", "--text-field": text_field is not None}
        for flag, given in of_text.items():
            if given:
                raise SettingError(f"{flag} is for text, and {folders[0]} is packed. Leave it out, or name the text.")
        source = Packed(folders, padding_token(tokenizer), sequence, vocabulary, completions_only)
    else:
        files = data_files(paths)
        if not packing and any(map(is_plain_text, files)):
            raise SettingError(
                "--no-packing uses the first row of each document, and a text file is one document. Give JSON lines, "
                "or leave --no-packing out."
            )
        reading = choose_reading(files, format, completions_only, text_field, tokenizer)
        source = Texts(files, reading, tokenizer, vocabulary, cache)
    with storage_errors(f"write tokens to {cache}"):
        check_no_link(cache)
        cache.mkdir(parents=True, exist_ok=True)
        sweep(cache)
        made_from = {"version": _VERSION, **source.made_from(), "sequence": sequence, "packing": packing}
        key = hashlib.blake2b(json.dumps(made_from, sort_keys=True).encode(), digest_size=12).hexdigest()
        found = _found(cache / key, padding=source.padding, warn=warn)
        if found is None:
            _write(cache, key, source, sequence=sequence, packing=packing, progress=progress)
            found = _found(cache / key, padding=source.padding, reused=False)
    if found is None:
        raise StorageError(f"The tokens in {cache / key} were removed while they were in use. Start again.")
    if vocabulary is not None and found.largest_token >= vocabulary:
        raise source.beyond_vocabulary(found.largest_token)
    return found


def input_bytes(paths: Sequence[Path | str]) -> int:
    """The approximate bytes to read, for a progress bar."""
    if folders := packed_folders(paths):
        return sum(file.bytes for folder in folders for shard in read_index(folder).shards for file in shard.files)
    return sum(file_size(path) for path in data_files(paths))


def _write(
    cache: Path, key: str, source: Texts | Packed, *, sequence: int, packing: bool, progress: Progress | None
) -> None:
    count = 0
    with being_written(cache, key) as directory, ExitStack() as ends:
        writer = RowWriter(directory, ends, sequence=sequence, packing=packing, padding=source.padding)
        for ids, labels, ended in source.encoded(progress):
            writer.add(ids, labels)
            count += ended
        fingerprint = writer.close()
        if not writer.rows:
            of = f" of {count} documents" if count else ""
            raise SettingError(
                f"{source.place}: none{of} with {writer.tokens} tokens has a token to train on within --sequence "
                f"{sequence}. Prompts may be longer than that, or documents may have one token. Raise --sequence."
            )
        facts = {
            "sequence": sequence,
            "documents": count,
            "largest_token": source.largest,
            "format": source.format,
            "fingerprint": fingerprint,
            "marks": writer.marks(),
            **{name: getattr(writer, name) for name in _COUNTS},
        }
        with (directory / "prepared.json").open("w") as file:
            json.dump(facts | {"sum": _sum(facts)}, file)
            file.flush()
            os.fsync(file.fileno())


def _found(
    directory: Path, *, padding: int, reused: bool = True, warn: Callable[[str], None] = lambda _: None
) -> Prepared | None:
    """The arrays in ``directory``, if they are complete and undamaged; otherwise removes them."""
    if not os.path.lexists(directory):
        return None
    try:
        inside(directory.parent, directory.name)
        facts = parse_json(read_small(inside(directory, "prepared.json")))
        if facts.pop("sum") != _sum(facts):
            raise ValueError("the checksum of prepared.json is wrong")
        marks = facts.pop("marks")
        arrays = {name: inside(directory, f"{name}.npy") for name in ARRAYS}
        found = Prepared(arrays=arrays, reused=reused, **facts)

        def check(name: str) -> None:
            check_array(
                arrays[name],
                rows=found.rows,
                sequence=found.sequence,
                crc=marks[name][0],
                least=0 if name == "input_ids" else IGNORED,
                largest=max(found.largest_token, padding),
            )

        with ThreadPoolExecutor() as pool:  # numpy, zlib and reading release the GIL
            list(pool.map(check, arrays))
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warn(f"The tokens in {directory} cannot be used ({reason(error)}). Making them again.")
    if directory.is_symlink():
        directory.unlink()
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return None


def _sum(facts: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())
