"""`load_weights`: reads a folder of safetensors, as transformers writes them, into a model, streamed or not."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch
from torch import nn

from ...core.errors import CheckpointError, WrongModel
from ...memory.disk.contained import JSON_LIMIT_BYTES, parse_json
from ...memory.disk.safetensors_header import Entry
from ...memory.disk.stored import StoredTensor
from ...streams.home.parameter import plain
from ..content.adapter import base_name, base_names, is_adapter_name
from ..content.names import compare, names_of
from ..content.parts import INDEX
from ..files import disk
from ..files.tensor_files import read_header, reading
from ..files.threads import run_all
from ..folders.manifest import MANIFEST, STORM, check_sums, file_in, read_manifest
from ..state.session_state import durable_of

SINGLE = "model.safetensors"


def load_weights(model: nn.Module, directory: Path | str | os.PathLike[str]) -> list[str]:
    """Fill the model's parameters and buffers from the safetensors in ``directory``; returns the names loaded.

    Reads one file, or several with an index. Bytes go straight into the parameters' memory, which is home memory if the
    model is streamed; tensors of another dtype are converted chunk by chunk. The files must hold exactly the model's
    names, one name for tied weights; otherwise it raises and changes nothing. Masters follow the weights; moments do
    not change. Blocks.
    """
    path = Path(directory)
    names = names_of(model)
    empty = [name for name, tensor in names.tensors.items() if tensor.is_meta]
    if empty:
        raise WrongModel(
            f"{empty[0]!r}{f' and {len(empty) - 1} more' if len(empty) > 1 else ''} have no memory (device meta). "
            "Stream the model first, or build it on the CPU."
        )
    files = files_of(path)
    headers = {file: read_header(path / file) for file in files}
    last = {name: file for file, header in headers.items() for name in header}  # which counts if two have a name
    headers = {file: {n: entry for n, entry in header.items() if last[n] == file} for file, header in headers.items()}
    places = base_names(model, names.tensors)
    alias = {base_name(model, name): base_name(model, first) for name, first in names.first.items()}
    found: dict[str, Entry] = {}
    chosen: dict[str, str] = {}  # name in the model to name in the files
    for header in headers.values():
        for name, entry in header.items():
            if name in names.non_persistent and name not in places:
                continue
            known = name if name in places else alias.get(name, name)
            if known in found and known != name:
                continue  # a tied weight that has both names in the file
            found[known], chosen[known] = entry, name
    wanted = {name: names.tensors[mine[0]] for name, mine in places.items()}
    for name in [name for name in wanted if name not in found and is_adapter_name(model, name)]:
        del wanted[name]
    compare(found, wanted, str(path), dtypes=False)
    sums = {}
    if (path / STORM / MANIFEST).is_file():
        manifest = read_manifest(path)
        sums = manifest.files
        check_sums(path, manifest, {INDEX} & sums.keys() if len(files) > 1 else ())
    durable = durable_of(model)
    targets: dict[str, torch.Tensor | StoredTensor] = {}
    for known, name in chosen.items():
        tensor = wanted[known]
        stored = durable.stored_weight(tensor) if durable and found[known].dtype == tensor.dtype else None
        targets[name] = stored or plain(tensor).detach()
    touched = {id(names.tensors[mine]) for name in wanted for mine in places[name]}
    parameters = [parameter for parameter in model.parameters() if id(parameter) in touched]
    fixed = durable.spans({name: wanted[known] for known, name in chosen.items()}) if durable else {}
    with torch.no_grad(), durable.rewriting(parameters, with_states=False) if durable else contextlib.nullcontext():
        run_all(reading(path, headers, targets, sums, fixed))
        for name, tensor in wanted.items():
            for other in places[name][1:]:
                plain(names.tensors[other]).copy_(plain(tensor))
    if durable:
        durable.note_written(parameters)
    else:
        torch.autograd.graph.increment_version(parameters)
    return sorted(wanted)


def files_of(path: Path) -> list[str]:
    """The names of the safetensors files that hold the model."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder. Name one with {SINGLE} or {INDEX} in it.")
    if (path / SINGLE).is_file():  # in the order of transformers
        return [file_in(path, SINGLE).name]
    if (path / INDEX).is_file():
        files = sorted(set(weight_map(path / INDEX).values()))
        missing = [file for file in files if not os.path.isfile(file_in(path, file))]  # noqa: PTH113  # never raises
        if missing:
            raise CheckpointError(
                f"{path / missing[0]} is missing: {len(missing)} of the {len(files)} files that {INDEX} names are not "
                "there. Copy them too."
            )
        return files
    others = sorted(file.name for file in path.glob("*.safetensors"))
    if len(others) == 1:
        return [file_in(path, others[0]).name]
    raise CheckpointError(
        f"{path} holds no {SINGLE} and no {INDEX}"
        f"{f', but {len(others)} other safetensors files such as {others[0]}' if others else ''}. Name a folder of "
        "weights."
    )


def weight_map(index: Path) -> dict[str, str]:
    """The file of each weight."""
    try:
        given = parse_json(disk.read_whole(file_in(index.parent, index.name), limit_bytes=JSON_LIMIT_BYTES))
        return {str(name): str(file) for name, file in given["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged ({error}). Copy it again.") from None
