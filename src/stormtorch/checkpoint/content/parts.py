"""The content of a checkpoint: tensors divided into safetensors files, and one small file for the rest.

Tensors are named by parameter: ``<name>`` among the weights, ``<name>.<key>`` among the optimizer's states. States that
are numbers, or that safetensors cannot hold, go to ``storm/state.pt`` with the rest."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...core.errors import SettingError
from ...core.notices import say_once
from ...streams.home.parameter import plain
from ...streams.optimizer.updater import MASTER
from ..files.tensor_files import NAMES, header_for, into_shards
from ..folders.manifest import STORM, describe_versions
from ..state.random_state import random_state
from ..state.session_state import Durable
from ..state.snapshot import Piece
from .adapter import adapter_files, is_adapted
from .names import extra_states, names_of

STATE = f"{STORM}/state.pt"
OPTIMIZER = f"{STORM}/optimizer"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # as transformers divides


@dataclass
class TensorFile:
    """A file to write: its header, and the pieces after it."""

    name: str
    header: bytes
    pieces: list[Piece]

    @property
    def size(self) -> int:
        return len(self.header) + sum(piece.tensor.nbytes for piece in self.pieces)


@dataclass
class Content:
    """Everything in one checkpoint, except files that user code or transformers adds."""

    step: int
    files: list[TensorFile] = field(default_factory=list)
    small: dict[str, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files) + sum(len(data) for data in self.small.values())

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's tensors."""
        return sum(file.size for file in self.files if file.name.startswith(OPTIMIZER))

    @property
    def pieces(self) -> list[Piece]:
        return [piece for file in self.files for piece in file.pieces]


def gather(
    model: nn.Module, durable: Durable, *, step: int, also: Mapping[str, Any], with_states: bool = True
) -> Content:
    """Collect the present content; ``with_states``: with the optimizer's states.

    Copies nothing large. The caller has settled home memory."""
    content = Content(step)
    names = names_of(model)
    _warn_unsaved_parameters(durable.optimizer, model, also.values())
    if is_adapted(model):
        for file, tensors in adapter_files(model).items():
            _add(content, {file: list(tensors)}, {name: _piece(durable, t, name) for name, t in tensors.items()})
    else:
        pieces = {name: _piece(durable, tensor, name) for name, tensor in names.tensors.items()}
        shards = into_shards({name: piece.tensor.nbytes for name, piece in pieces.items()}, "model", SHARD_BYTES)
        _add(content, shards, pieces)
        if len(shards) > 1:
            content.small[INDEX] = _index(shards, sum(piece.tensor.nbytes for piece in pieces.values()))
    content.small[STATE] = _serialised(
        {
            "format": 1,
            "step": step,
            "optimizer": _optimizer(content, durable, names.tensors, with_states),
            "random": random_state(),
            "extra": extra_states(names),
            "also": {
                name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in also.items()
            },
            "versions": describe_versions(),
        }
    )
    return content


def _piece(durable: Durable, tensor: torch.Tensor, name: str) -> Piece:
    unit = durable.unit_of(tensor)
    found = plain(tensor).detach()
    if found.layout is not torch.strided or found.dtype not in NAMES:
        raise SettingError(
            f"{name!r} cannot be saved: safetensors has no {found.dtype} tensors of layout {found.layout}."
        )
    in_file = durable.in_file(tensor) if found.is_contiguous() else None
    return Piece(found, unit, durable.is_frozen(tensor), stored=durable.stored_weight(tensor), in_file=in_file)


def _add(content: Content, shards: Mapping[str, list[str]], pieces: Mapping[str, Piece]) -> None:
    for file, names in shards.items():
        mine = [pieces[name] for name in names]
        header = header_for((name, piece.tensor) for name, piece in zip(names, mine, strict=True))
        content.files.append(TensorFile(file, header, mine))


def _index(shards: Mapping[str, list[str]], total: int) -> bytes:
    weight_map = {name: file for file, names in shards.items() for name in names}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(content, indent=2) + "\n").encode()


def parameter_names(optimizer: torch.optim.Optimizer, names: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """Names of the optimizer's parameters by identity; parameters that the model does not have get their position."""
    known = {id(tensor): name for name, tensor in names.items()}
    return {
        id(parameter): known.get(id(parameter), f"param_groups.{number}.{position}")
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    }


def _warn_unsaved_parameters(optimizer: torch.optim.Optimizer | None, model: nn.Module, also: Iterable[Any]) -> None:
    """Warn about the optimizer's parameters that belong neither to the model nor to a module in ``also``."""
    modules = [model, *(value for value in also if isinstance(value, nn.Module))]
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    groups = optimizer.param_groups if optimizer is not None else ()
    beside = sum(id(parameter) not in known for group in groups for parameter in group["params"])
    if beside:
        say_once(
            f"The optimizer holds {beside} parameters that the model does not have. A checkpoint holds their states, "
            "not their values. Save the module that has them with also={...}."
        )


def _optimizer(
    content: Content, durable: Durable, tensors: Mapping[str, torch.Tensor], with_states: bool
) -> dict[str, Any] | None:
    """Add files with the optimizer's tensors to ``content``; returns the rest. Without states, "numbers" is None."""
    optimizer = durable.optimizer
    if optimizer is None:
        return None
    called = parameter_names(optimizer, tensors)
    pieces: dict[str, Piece] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for parameter, state in durable.states() if with_states else ():
        name = called.get(id(parameter))
        if name is None:
            continue  # the parameter was removed from its group
        numbers[name] = {}
        for key, value in state.items():
            if _has_file_form(key, value, durable.has_home(parameter, key)):
                stored = durable.stored(parameter, key)
                pieces[f"{name}.{key}"] = Piece(value.detach(), durable.unit_of(parameter), stored=stored)
                numbers[name][key] = None  # keeps the order of the keys
            else:
                numbers[name][key] = value.clone() if isinstance(value, torch.Tensor) else value  # it may be a view
    shards = into_shards({name: piece.tensor.nbytes for name, piece in pieces.items()}, OPTIMIZER, SHARD_BYTES)
    _add(content, shards, pieces)
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [called[id(p)] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return {
        "class": type(optimizer).__name__,
        "groups": groups,
        "numbers": numbers if with_states else None,
        "masters": any(MASTER in state for state in numbers.values()),
    }


def _has_file_form(key: str, value: Any, at_home: bool) -> bool:
    """Whether the state goes to a tensor file. ``at_home``: it lies in home memory, so even a single number goes."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and (value.ndim > 0 or at_home)
        and value.dtype in NAMES
        and "." not in key
    )


def _serialised(state: dict[str, Any]) -> bytes:
    """Serialise for ``torch.load(weights_only=True)``; refuses now the objects that loading would refuse."""
    try:
        return _verified_bytes(state)
    except Exception as error:
        for name, value in state["also"].items():
            try:
                _verified_bytes(value)
            except Exception as cause:
                raise SettingError(
                    f"also[{name!r}] cannot be saved: it holds objects that torch.load(weights_only=True) refuses. "
                    f"Use numbers, strings, tensors, and lists and dicts of them. ({str(cause).splitlines()[0]})"
                ) from cause
        raise SettingError(
            "The optimizer's state, or an extra state of a module, cannot be saved: it holds objects that "
            f"torch.load(weights_only=True) refuses. ({str(error).splitlines()[0]})"
        ) from error


def _verified_bytes(value: Any) -> bytes:
    """The bytes of a file with ``value``, after reading them back."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True, map_location="cpu")
    return buffer.getvalue()
