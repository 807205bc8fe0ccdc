"""Reads text and JSON lines, one line in memory at a time, for ``storm data pack`` and ``storm train`` alike."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...core.errors import StorageError, StormError
from ...core.sizes import MiB, format_bytes
from ...memory.disk.calls import storage_error

LINE_LIMIT = 256 * MiB
JSON_LINES = frozenset({".jsonl", ".ndjson", ".json"})
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Progress = Callable[[int], None]


def lines(path: Path, progress: Progress | None = None, *, gzipped: bool = False) -> Iterator[tuple[int, bytes]]:
    """Each line with its number, counted from 1, without a byte order mark in front.

    Calls ``progress`` with the bytes of the file that each line took.
    """
    try:
        with path.open("rb", buffering=MiB) as file:
            source = gzip.GzipFile(fileobj=file) if gzipped else file
            number, seen = 0, 0
            while line := source.readline(LINE_LIMIT + 1):
                number += 1
                if len(line) > LINE_LIMIT:
                    raise StorageError(
                        f"{path}, line {number}: longer than {format_bytes(LINE_LIMIT)}, the limit of a line. Break it "
                        "into lines."
                    )
                yield number, line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                place = file.tell() if gzipped else seen + len(line)
                if progress is not None:
                    progress(place - seen)
                seen = place
    except (OSError, EOFError) as error:  # gzip raises EOFError for a truncated file, BadGzipFile for a damaged one
        if isinstance(error, StormError):
            raise
        if isinstance(error, EOFError | gzip.BadGzipFile):
            raise StorageError(f"{path}, after line {number}: {error}. Write or copy it again.") from error
        raise storage_error(f"read {path}", error) from error


def decode(line: bytes) -> str:
    """Decode UTF-8. Raises ValueError with the reason."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line") from error


def parse_object(line: str) -> dict[str, Any]:
    """Parse a line with one JSON object. Raises ValueError with the reason and the column."""
    try:
        found = json.loads(line.rstrip("\r\n"))  # else json reports an unclosed quote as an invalid control character
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(found, dict):
        names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
        raise ValueError(f"a JSON {names.get(type(found), 'number')}, not an object")
    return found
