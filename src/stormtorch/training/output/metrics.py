"""Writes ``metrics.jsonl``, one JSON object per line, flushed at once; and TensorBoard files, if the user wants them.

A resumed run first cuts the file back to the checkpoint's step, because it does the later steps again.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ...core.endings import Closing
from ...core.errors import StorageError
from ...core.sizes import MiB
from ...memory.disk.calls import storage_error, storage_errors
from ...memory.disk.contained import check_no_link, open_to_write, opened, parse_json
from ..errors import require
from ..reporting import Spent

_LONGEST = 64 * MiB


def cut_back(path: Path, step: int) -> None:
    """Remove all records after ``step``, and an incomplete last line. Keeps lines that are not ours. Atomic."""
    beside = path.with_name(f".{path.name}.writing-{os.getpid()}")
    try:
        check_no_link(path)
        with opened(path) as before, os.fdopen(open_to_write(beside, append=False), "wb") as file:
            file.writelines(line for line in _lines(before) if _is_kept(line, step))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except FileNotFoundError:
        return
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise error if isinstance(error, StorageError) else storage_error(f"write {path}", error) from error


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines with their line ends. Skips lines that are too long for a record, without holding them in memory."""
    begins = True
    while line := file.readline(_LONGEST):
        ends = line.endswith(b"\n")
        if begins and (ends or len(line) < _LONGEST):
            yield line if ends else line + b"\n"  # a kill may have come just before the last line end
        begins = ends


def _is_kept(line: bytes, step: int) -> bool:
    try:
        record = parse_json(line.decode("utf-8", "replace"))
    except ValueError:
        return False
    is_ours = isinstance(record, dict) and "kind" in record and isinstance(record.get("step"), int)
    return record["step"] <= step if is_ours else isinstance(record, dict)


class Metrics(Closing):
    """Writes records, each with a step and a kind: load, resume, step, skip, nan, evaluation, sample, save or end."""

    def __init__(self, path: Path, *, tensorboard: Path | None, purge_step: int) -> None:
        with storage_errors(f"write {path}"):
            self._file: TextIO = os.fdopen(open_to_write(path, append=True), "a", encoding="utf-8")
        self._path = path
        self.spent: dict[str, list[Spent]] = {}  # by kind
        self._board: Any = None
        self._full = False
        if tensorboard is not None:
            writers = require("torch.utils.tensorboard", extra="log", why="--tensorboard")
            self._board = writers.SummaryWriter(str(tensorboard), purge_step=purge_step)

    def write_spent(self, kind: str, step: int, spent: Spent, **values: Any) -> None:
        """Append a record of loading, resuming or saving, and remember its cost."""
        self.spent.setdefault(kind, []).append(spent)
        self.write(kind, step, **values, seconds=round(spent.seconds, 3), bytes=spent.size_bytes)

    def write(self, kind: str, step: int, **values: Any) -> StorageError | None:
        """Append one record. A full disk does not end a run: the error is returned, once."""
        record = {"kind": kind, "step": step, **values, "time": round(time.time(), 3)}
        problem = None
        try:
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._file.flush()
            self._full = False
        except OSError as error:
            problem = None if self._full else storage_error(f"write {self._path}", error)
            self._full = True
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._board.add_scalar(f"{kind}/{name}", value, step)
                elif isinstance(value, str):
                    self._board.add_text(f"{kind}/{name}", value, step)
            self._board.flush()
        return problem

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the write has reported it
            self._file.close()
        if self._board is not None:
            self._board.close()
