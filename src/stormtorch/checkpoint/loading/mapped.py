"""`map_weights`: gives frozen parameters of the meta device the memory of the model's own files; reads nothing."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import nn

from ...memory.disk.calls import storage_errors
from ...memory.disk.contained import opened
from ...memory.disk.safetensors_header import Entry
from ..content.adapter import base_name
from ..content.names import names_of
from ..files.tensor_files import read_header
from ..folders.manifest import MANIFEST, STORM
from .weights import files_of

_NO_RESERVE = 0x4000  # Linux: a mapping larger than RAM is no promise of memory; Python 3.11 has no name for it


def map_weights(model: nn.Module, directory: Path) -> bool:
    """Replace each frozen meta parameter by one that is a view of its file in ``directory``, if that has the same dtype
    and shape. `stream` can then leave these weights in the files. Returns whether the model then has all that the files
    hold; else `load_weights` brings the rest, and verifies checksums if there are any."""
    names = names_of(model)
    wanted: dict[str, torch.Tensor] = {}
    for name, first in names.first.items():
        tensor = names.tensors[first]
        if isinstance(tensor, nn.Parameter) and tensor.is_meta and not tensor.requires_grad:
            wanted[base_name(model, name)] = tensor
    made: dict[int, nn.Parameter] = {}  # by id of the meta parameter
    is_whole = not (directory / STORM / MANIFEST).is_file()
    for file in files_of(directory):
        path = directory / file
        header = read_header(path)
        here = {name: entry for name, entry in header.items() if _fits(entry, wanted.get(name))}
        is_whole = is_whole and len(here) == len(header)
        pages = _pages(path) if here else None
        for name, entry in here.items():
            assert pages is not None
            made.setdefault(id(wanted[name]), nn.Parameter(_view(pages, entry), requires_grad=False))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in made:
                module._parameters[name] = made[id(parameter)]
    return is_whole and not any(parameter.is_meta for parameter in model.parameters())


def _fits(entry: Entry, parameter: torch.Tensor | None) -> bool:
    if parameter is None or entry.start % entry.dtype.itemsize or not entry.size:
        return False
    return entry.dtype == parameter.dtype and entry.shape == tuple(parameter.shape)


def _pages(path: Path) -> mmap.mmap:
    """The bytes of a file. A write to them does not reach the file."""
    flags, access = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    with storage_errors(f"map {path}"), opened(path) as file:
        return mmap.mmap(file.fileno(), 0, flags=flags, prot=access)


def _view(pages: mmap.mmap, entry: Entry) -> torch.Tensor:
    """A tensor over a part of the file; it keeps the mapping."""
    count = entry.size // entry.dtype.itemsize
    with torch.inference_mode(False):
        return torch.frombuffer(pages, dtype=entry.dtype, count=count, offset=entry.start).view(entry.shape)
