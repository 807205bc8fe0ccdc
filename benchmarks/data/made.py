"""The data: made here, the same bytes for every method, each row marked with its own number.

A row of floats begins with its number, which float32 holds exactly up to 2^24; a window of tokens with its number in
two tokens. That is how a benchmark proves that every sample came once. The rest is noise, because a disk that
compresses would be too fast with zeros.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .cases import ROW_FLOATS, SEQUENCE, Case

Array = npt.NDArray[Any]
Shard = tuple[Path, int, int]  # file, first row, number of rows
_PIECE_ROWS = 4096
CLASSES = 10


def marked(kind: str, first: int, count: int, noise: Array) -> Array:
    """``noise``, cut to ``count`` rows which carry the numbers from ``first``; changes and returns it."""
    piece, numbers = noise[:count], np.arange(first, first + count)
    if kind == "rows":
        assert first + count <= 1 << 24
        piece[:, 0] = numbers
    else:
        piece[:, 0], piece[:, 1] = numbers & 0xFFFF, numbers >> 16
    return piece


def pieces(kind: str, rows: int, *, first: int = 0) -> Iterator[Array]:
    """The dataset in order, some thousand rows at a time; each piece is valid until the next."""
    random = np.random.default_rng(5)
    if kind == "rows":
        noise: Array = random.standard_normal((min(rows, _PIECE_ROWS), ROW_FLOATS), dtype=np.float32)
    else:
        noise = random.integers(0, 50_000, (min(rows, _PIECE_ROWS), SEQUENCE), dtype=np.uint16)
    for start in range(0, rows, _PIECE_ROWS):
        yield marked(kind, first + start, min(_PIECE_ROWS, rows - start), noise)


def make_rows(file: Path, rows: int, *, first: int = 0, drop: bool = False) -> Path:
    """An ``.npy`` of rows; with ``drop`` the page cache is asked to forget it, once it is on disk."""
    with file.open("wb") as out:
        header = {"descr": "<f4", "fortran_order": False, "shape": (rows, ROW_FLOATS)}
        np.lib.format.write_array_header_1_0(out, header)
        for piece in pieces("rows", rows, first=first):
            out.write(piece.data)
        if drop:
            out.flush()
            os.fdatasync(out.fileno())
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return file


def make_tokens(file: Path, rows: int) -> Path:
    """A flat file of uint16."""
    with file.open("wb") as out:
        for piece in pieces("tokens", rows):
            out.write(piece.data)
    return file


def plain_file(folder: Path, kind: str) -> Path:
    """Where the one file of the groups `rows` and `tokens` lies."""
    return folder / ("rows.npy" if kind == "rows" else "tokens.bin")


def shard_files(case: Case) -> list[Shard]:
    """What the case reads. Of cases with one data set, the larger ones read what the smaller ones read, and more."""
    shards, count = _all_shards(case), -(-case.rows // case.shard_rows)
    if not case.set_rows:
        return shards
    if case.rows % case.shard_rows or count > len(shards):
        raise ValueError(f"{case.rows} rows are not whole shards of {case.set_rows} rows")
    return [shards[number] for number in np.random.default_rng(3).permutation(len(shards))[:count]]


def _all_shards(case: Case) -> list[Shard]:
    rows, most = case.set_rows or case.rows, case.shard_rows
    cuts = [(first, min(most, rows - first)) for first in range(0, rows, most)]
    return [(Path(case.folder) / f"rows_{first:08}_{count}.npy", first, count) for first, count in cuts]


def labels_file(case: Case) -> Path:
    return Path(case.folder) / f"labels_{case.rows}.npy"


def make(case: Case) -> None:
    """Makes what torch and STORM read in this case, where it is not there already: one file, or shards and labels.

    Of a data set, all of it: what is written between two measurements would change what the disk has at hand.
    """
    plain = plain_file(Path(case.folder), case.kind)
    if case.group in {"flat", "gpu"}:
        for file, first, count in _all_shards(case):
            if not file.exists():
                make_rows(file, count, first=first, drop=case.group == "flat")
        if case.group == "gpu":
            np.save(labels_file(case), np.random.default_rng(7).integers(0, CLASSES, case.rows, dtype=np.int64))
        os.sync()  # what is still on its way to the disk would be measured too
    elif not plain.exists():
        (make_rows if case.kind == "rows" else make_tokens)(plain, case.rows)
