"""safetensors files: 8 bytes (the header's length, little endian), a JSON header, the tensors' bytes.

The safetensors library needs all tensors of a file in memory to write it, and maps the file to read it. This module
moves bytes straight from home memory to the file, and back.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ...core.errors import CheckpointError, WrongModel
from ...memory.disk.buffers import bytes_of
from ...memory.disk.mapped import Span
from ...memory.disk.safetensors_header import DTYPES, Entry, UnknownDtype, parse_header
from ...memory.disk.stored import StoredTensor
from . import disk
from .disk import CHUNK, FileReader, Record
from .threads import Task

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def header_for(tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """The header of a file that holds these tensors, one after another."""
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors:
        content[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file by name, in the order of their bytes. Raises CheckpointError if it is damaged."""
    with FileReader(path, sums=False) as file:

        def read(offset: int, count: int) -> bytearray:
            data = bytearray(count)
            file.skip_to(offset)
            file.read(data)
            return data

        try:
            return parse_header(read, file.size)
        except UnknownDtype as error:
            raise CheckpointError(f"{path}: {error}") from None
        except ValueError as error:
            raise CheckpointError(
                f"{path} is not a complete safetensors file ({error}). Copy or write it again."
            ) from None


def _has_file_layout(tensor: torch.Tensor) -> bool:
    """Whether its memory is laid out as in a file: contiguous, in RAM, without lazy negation or conjugation."""
    return tensor.is_contiguous() and tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()


Headers = Mapping[str, Mapping[str, Entry]]  # by file, then by the tensor's name in the order of their bytes


def reading(
    folder: Path,
    headers: Headers,
    targets: Mapping[str, torch.Tensor | StoredTensor],
    sums: Mapping[str, Record],
    fixed: Mapping[str, Span] = MappingProxyType({}),
) -> list[Task]:
    """Tasks that read the tensors of each file into ``targets``, by name: existing memory, or other files. They skip
    other tensors.

    They read every byte of a file that has an entry in ``sums``, and verify its checksum. ``fixed``: targets that lie
    in files, where they cannot be written. The tasks compare those, and raise WrongModel where they differ."""
    return [
        partial(_read_file, folder / file, header, targets, sums.get(file), fixed) for file, header in headers.items()
    ]


@torch.no_grad()
def _read_file(
    path: Path,
    header: Mapping[str, Entry],
    targets: Mapping[str, torch.Tensor | StoredTensor],
    expected: Record | None,
    fixed: Mapping[str, Span],
    stop: threading.Event,
) -> None:
    with FileReader(path, stop, sums=expected is not None) as file:
        for name, entry in header.items():
            target = targets.get(name)
            if isinstance(target, torch.Tensor) and name in fixed:
                _compare(file, entry, name, target, fixed[name])
            elif name in targets:
                file.skip_to(entry.start)
                _fill(file, entry, targets[name])
        if expected is not None:
            disk.check(path, file.finish(), expected)


def _compare(file: FileReader, entry: Entry, name: str, target: torch.Tensor, span: Span) -> None:
    """Raise unless a file holds the values of ``target``, which lies in ``span`` of another file or of the same."""
    if file.inode == span.inode and entry.start == span.offset and os.path.samefile(file.path, span.path):  # noqa: PTH121
        return
    file.skip_to(entry.start)
    flat, step = target.reshape(-1), CHUNK // entry.dtype.itemsize
    staging = torch.empty(min(step, flat.numel()), dtype=entry.dtype)
    for part in flat.split(step):
        there = staging[: part.numel()]
        file.read(bytes_of(there))
        if not torch.equal(there.to(target.dtype), part):
            raise WrongModel(
                f"{file.path} has other values of {name!r} than {span.path}, from which this frozen weight is read, "
                "because RAM has no room for it. Raise ram=, or open the model from the folder that has these values."
            )


def _fill(file: FileReader, entry: Entry, target: torch.Tensor | StoredTensor) -> None:
    """Read a tensor: directly if its memory is laid out as in the file, else chunk by chunk."""
    if isinstance(target, StoredTensor):
        buffer = memoryview(bytearray(min(CHUNK, target.nbytes)))
        for at in range(0, target.nbytes, CHUNK):
            file.read(buffer[: target.nbytes - at])
            target.write(buffer[: target.nbytes - at], at)
    elif _has_file_layout(target) and target.dtype == entry.dtype:
        file.read(bytes_of(target))
    elif target.is_contiguous():
        step = CHUNK // entry.dtype.itemsize
        staging = torch.empty(min(step, target.numel()), dtype=entry.dtype)
        for part in target.view(-1).split(step):
            file.read(bytes_of(staging[: part.numel()]))
            part.copy_(staging[: part.numel()])
    else:
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        file.read(bytes_of(whole))
        target.copy_(whole)


def into_shards(sizes: Mapping[str, int], stem: str, limit_bytes: int) -> dict[str, list[str]]:
    """The names of the tensors of each file: in order, as many as fit ``limit_bytes``, at least one."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = limit_bytes
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    count = len(groups)
    return {f"{stem}-{i:05d}-of-{count:05d}.safetensors": names for i, names in enumerate(groups, 1)}
