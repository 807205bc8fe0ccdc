"""Arrays in files: numpy's ``.npy``, and raw bytes whose dtype and shape the user gives.

A record (a structured dtype of numpy) becomes one field for each member, with gaps between the rows of each.
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ....core.errors import SettingError, StorageError
from ....memory.disk.calls import storage_errors
from ...source import Field, FileSource, Shard, Strip
from ..columns import one_after_another
from ..dtypes import BY_NAME, from_numpy, parse_dtype
from ..paths import Paths, file_size, listed, name_of_paths, whole_number

NAME = "data"  # of an array's only field, unless the user names it
Record = list[tuple[Field, int]]  # the fields of one row, each with its offset in the row
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def npy_source(path: Path) -> FileSource:
    """The rows of one ``.npy`` file, along its first dimension. Reads the header only."""
    size = file_size(path)
    try:
        with storage_errors(f"read {path}"), path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns that headers of Python 2 are slow to read
            version = np.lib.format.read_magic(file)
            if version not in _HEADERS:
                raise StorageError(
                    f"Cannot read {path}: its .npy version is {version[0]}.{version[1]}. Accepted: 1.0 and 2.0, which "
                    "numpy writes unless a member's name is beyond Latin-1."
                )
            shape, fortran, dtype = _HEADERS[version](file)
            offset = file.tell()
    except StorageError:
        raise
    except Exception as error:  # numpy parses the header as a Python literal; the file may come from anywhere
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise StorageError(
            f"Cannot read {path}: its .npy header is damaged ({reason}). Write the file again."
        ) from error
    if any(length < 0 for length in shape):
        raise StorageError(f"Cannot read {path}: its .npy header is damaged (shape {shape}). Write it again.")
    if not shape:
        raise SettingError(f"{path} holds a single number and no rows. Save an array whose first dimension is rows.")
    if fortran:
        raise SettingError(
            f"{path} is in Fortran order, so its rows do not lie together. "
            "Save it again: np.save(path, np.ascontiguousarray(array))."
        )
    record = _record(path, dtype, shape[1:])
    stride = dtype.itemsize * math.prod(shape[1:])
    if size < offset + shape[0] * stride:
        raise StorageError(
            f"{path} is truncated: {size} bytes, its header promises {offset + shape[0] * stride} ({shape[0]} rows of "
            f"{stride} bytes). The last whole row is {max((size - offset) // max(stride, 1), 0) - 1}. Write it again."
        )
    return array_source(path, record, shape[0], offset, stride)


def memmap_source(array: np.memmap) -> FileSource:
    """The rows of an ``np.memmap`` as it was opened. The loader reads the file, not the mapping."""
    path, shape, dtype = array.filename, array.shape, array.dtype
    whole = isinstance(array.base, mmap.mmap) and array.flags.c_contiguous
    if path is None or not whole or array.mode == "c" or not shape:
        raise SettingError(
            f"An np.memmap of {path} that is a view, copy-on-write, in Fortran order or without rows cannot be read "
            "from its file. Give the array as np.memmap or np.load opened it, or the path."
        )
    place = Path(path)
    stride = dtype.itemsize * math.prod(shape[1:])
    source = array_source(place, _record(place, dtype, shape[1:]), shape[0], array.offset, stride)
    return one_after_another(str(place), [source])


def raw(paths: Paths, *, dtype: object, shape: int | Iterable[int] = (), offset: int = 0) -> FileSource:
    """Rows of ``dtype`` and ``shape`` in files without a header, or with one of ``offset`` bytes.

    ``dtype``: a torch or numpy dtype or a name ("bfloat16"); a structured numpy dtype makes a field of each member.
    ``paths``: a file, a list, a pattern, or a directory whose files are the shards. Files must hold complete rows.
    """
    shape = tuple(whole_number("shape", length, 1) for length in (shape if isinstance(shape, Iterable) else (shape,)))
    offset = whole_number("offset", offset, 0)
    sources = []
    for path in listed(paths):
        size = file_size(path)
        if isinstance(dtype, np.dtype) and dtype.names:
            record, row_bytes = _record(path, dtype, shape), dtype.itemsize
        else:
            field = Field(name=NAME, dtype=parse_dtype(dtype), shape=shape)
            record, row_bytes = [(field, 0)], field.row_bytes
        rows, rest = divmod(max(size - offset, 0), max(row_bytes, 1))
        if rest or size < offset:
            raise StorageError(
                f"{path} has {size} bytes: after {offset} bytes of header, {rows} rows of {row_bytes} bytes and {rest} "
                "bytes more. It is truncated, or dtype, shape or offset is wrong."
            )
        sources.append(array_source(path, record, rows, offset, row_bytes))
    return one_after_another(name_of_paths(paths), sources)


def array_source(path: Path, record: Record, rows: int, offset: int, stride: int) -> FileSource:
    """``rows`` records in one file, the first at ``offset``, each next one ``stride`` bytes further."""
    strips = tuple(Strip(path=path, offset=offset + inner, stride=stride) for _, inner in record)
    fields = tuple(field for field, _ in record)
    return FileSource(name=str(path), fields=fields, shards=(Shard(rows=rows, strips=strips),))


def _record(path: Path, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Record:
    """The fields of a row and their offsets."""
    if dtype.names and dtype.fields:
        if shape:
            raise SettingError(f"{path} has rows of {shape} records. Accepted: one record in each row.")
        members = [(name, dtype.fields[name][0], dtype.fields[name][1]) for name in dtype.names]
    else:
        members = [(NAME, dtype, 0)]
    record = []
    for name, member, offset in members:
        base, inner = member.subdtype or (member, ())
        found = from_numpy(base)
        if found is None:
            raise SettingError(
                f"{path} holds {base} ({name!r}), a dtype that torch does not have. "
                f"Save it again as one of {', '.join(BY_NAME)}, little endian."
            )
        record.append((Field(name=name, dtype=found, shape=shape + inner), offset))
    return record
