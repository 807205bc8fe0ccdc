"""Loads a checkpoint: checks it against the model before any change, then reads straight into home memory."""

from __future__ import annotations

import contextlib
import io
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.errors import CheckpointError, SettingError, StormError, WrongModel
from ...core.notices import say_once
from ...memory.books.limits import host_available_bytes
from ...memory.disk.stored import StoredTensor
from ...streams.home.parameter import plain
from ...streams.optimizer.updater import MASTER
from ..content.adapter import WEIGHTS, adapter_files, is_adapted
from ..content.names import Names, compare, names_of
from ..content.parts import OPTIMIZER, STATE, parameter_names
from ..files import disk
from ..files.disk import Record
from ..files.tensor_files import read_header, reading
from ..files.threads import Task, run_all
from ..folders.manifest import Manifest, check_complete, check_sums, file_in, is_tensors
from ..state.random_state import set_random_state
from ..state.session_state import Durable

_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_PARTS = {"step", "optimizer", "random", "extra", "also"}
_FLAGS = {"amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize"}
# A session chooses its arithmetic by these settings when it starts.
_FIXED = ("amsgrad", "capturable", "differentiable")


def load_into(
    model: nn.Module,
    durable: Durable,
    directory: Path,
    also: Mapping[str, Any],
    begin: Callable[[Path], None],
) -> tuple[int, dict[str, Any]]:
    """Restore everything; returns the step, and saved ``also`` entries that the caller named no object for.

    Calls ``begin`` after all checks, before the first change."""
    manifest = check_complete(directory)
    check_sums(directory, manifest, [name for name in manifest.files if not is_tensors(name) and name != STATE])
    state = _read_state(directory, manifest)
    names = names_of(model)
    states = _States()
    groups: list[dict[str, Any]] = []
    with _unexpected_content(directory):
        _check_also(directory, also, state["also"])
        jobs, weights = _weights(model, names, directory, manifest, durable)
        saved = state["optimizer"]
        if durable.optimizer is not None:
            if saved is not None and saved["numbers"] is None:
                groups = _groups_that_fit(durable, durable.optimizer, names, directory, saved)
                _warn_optimizer_restarts(directory, durable.optimizer, bool(groups))
            else:
                states = _states(durable, names, directory, manifest, saved)
                groups = saved["groups"]
            _check_values(directory, durable.optimizer, groups)
    begin(directory)
    with torch.no_grad(), durable.rewriting(model.parameters(), with_states=durable.optimizer is not None):
        run_all(jobs + states.jobs)
        for room, value in states.single:
            room.copy_(value)
    durable.note_written(weights)
    with _unexpected_content(directory):
        if durable.optimizer is not None:
            with torch.no_grad():
                durable.install(states.by_parameter)
            _set_groups(durable.optimizer, groups)
        durable.forget_gradients()
        for name, value in state["extra"].items():
            names.modules_with_extra[name].set_extra_state(value)
        rest = dict(state["also"])
        for name, target in also.items():
            target.load_state_dict(rest.pop(name))
        set_random_state(state["random"])  # last: the steps before may have drawn random numbers
        return int(state["step"]), rest


@contextlib.contextmanager
def _unexpected_content(directory: Path) -> Iterator[None]:
    """Report other errors of the block as unexpected content: checksums may be right while the structure is not."""
    try:
        yield
    except (StormError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise CheckpointError(
            f"{directory / STATE} has unexpected content ({type(error).__name__}: {lines[0][:200]}). Use another "
            "checkpoint."
        ) from error


def _read_state(directory: Path, manifest: Manifest) -> dict[str, Any]:
    if STATE not in manifest.files:
        raise CheckpointError(f"{directory} has no {STATE}. Use another checkpoint.")
    path = file_in(directory, STATE)
    data = disk.read_whole(path, limit_bytes=host_available_bytes())
    disk.check(path, Record(len(data), zlib.crc32(data)), manifest.files[STATE])
    try:
        state = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # from pickle, zipfile or torch: it holds code, or is another kind of file
        reason = (str(error).splitlines() or [""])[0][:200]
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {reason}). Use another one.") from error
    missing = _PARTS - (state.keys() if isinstance(state, dict) else set())
    if missing:
        raise CheckpointError(f"{path} has unexpected content: no {sorted(missing)[0]!r}. Use another one.")
    found: dict[str, Any] = state
    return found


def _check_also(directory: Path, wanted: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for name, target in wanted.items():
        if not hasattr(target, "load_state_dict"):
            raise SettingError(f"also[{name!r}] has no load_state_dict. Plain data that was saved is returned by load.")
        if name not in saved:
            raise CheckpointError(f"{directory} holds nothing for also[{name!r}]. It has {sorted(saved) or 'nothing'}.")


def _weights(
    model: nn.Module, names: Names, directory: Path, manifest: Manifest, durable: Durable
) -> tuple[list[Task], list[torch.Tensor]]:
    """The model's tensors, or the adapters' alone, and the jobs that fill them."""
    if is_adapted(model):
        wanted_by_file = adapter_files(model)
        if not any(name.endswith(WEIGHTS) for name in manifest.files):
            raise WrongModel(
                f"{directory} holds a whole model, not an adapter. Load it into the base model with load_weights."
            )
    else:
        wanted_by_file = {"": names.tensors}
        if any(name.endswith(WEIGHTS) for name in manifest.files):
            raise WrongModel(f"{directory} holds an adapter of PEFT. Build the model with get_peft_model first.")
    jobs: list[Task] = []
    for file, wanted in wanted_by_file.items():
        files = [file] if file else [name for name in manifest.files if _SHARD.fullmatch(name)]
        headers = {name: read_header(file_in(directory, name)) for name in files if name in manifest.files}
        found = {name: entry for header in headers.values() for name, entry in header.items()}
        compare(found, wanted, str(directory), dtypes=True)
        targets = {name: durable.stored_weight(tensor) or plain(tensor).detach() for name, tensor in wanted.items()}
        jobs += reading(directory, headers, targets, manifest.files, durable.spans(wanted))
    return jobs, [tensor for wanted in wanted_by_file.values() for tensor in wanted.values()]


@dataclass(frozen=True)
class _States:
    """The optimizer's states after loading."""

    by_parameter: dict[nn.Parameter, dict[str, Any]] = field(default_factory=dict)
    jobs: list[Task] = field(default_factory=list)
    single: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (target, number)


def _states(
    durable: Durable,
    names: Names,
    directory: Path,
    manifest: Manifest,
    saved: dict[str, Any] | None,
) -> _States:
    optimizer = durable.optimizer
    assert optimizer is not None
    _check_optimizer(durable, optimizer, names, directory, saved)
    assert saved is not None
    called = parameter_names(optimizer, names.tensors)
    parameters = {called[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    headers = {
        name: read_header(file_in(directory, name))
        for name in manifest.files
        if name.startswith(OPTIMIZER) and name.endswith(".safetensors")
    }
    states, targets = _States(), dict[str, torch.Tensor | StoredTensor]()
    forms: dict[str, dict[str, tuple[torch.Size, torch.dtype]]] = {}
    for header in headers.values():
        for full, entry in header.items():
            name, key = full.rsplit(".", 1)
            forms.setdefault(name, {})[key] = (torch.Size(entry.shape), entry.dtype)
    unknown = [name for name in {**saved["numbers"], **forms} if name not in parameters]
    if unknown:
        raise WrongModel(f"{directory} has states of {unknown[0]!r}, which the optimizer here does not hold.")
    if lost := forms.keys() - saved["numbers"].keys():
        raise CheckpointError(f"{directory / STATE} knows no states of {min(lost)!r}. Use another checkpoint.")
    for name, numbers in saved["numbers"].items():
        parameter = parameters[name]
        if not _is_count(numbers.get("step", 0)):
            raise CheckpointError(f"{directory / STATE} gives no step count of {name!r}. Use another checkpoint.")
        if MASTER in numbers and durable.unit_of(parameter) is None:
            raise WrongModel(
                f"{directory} was saved with an fp32 master of {name!r}, which is not streamed here. Give the only= "
                "and leave= of that run."
            )
        beside = {  # earlier versions saved states of a parameter with one element here
            key: value
            for key, value in numbers.items()
            if isinstance(value, torch.Tensor) and durable.has_home(parameter, key)
        }
        shapes = {key: (value.shape, value.dtype) for key, value in beside.items()}
        try:
            rooms = durable.room_for(parameter, {**forms.get(name, {}), **shapes})
        except TypeError as error:
            raise WrongModel(
                f"{directory} has {error.args[0]!r} of {name!r} in another shape or dtype than here."
            ) from None
        targets |= {f"{name}.{key}": durable.stored(parameter, key) or rooms[key] for key in forms.get(name, {})}
        states.single.extend((rooms[key], value) for key, value in beside.items())
        states.by_parameter[parameter] = {
            **_on_device_of(parameter, optimizer, numbers, durable.unit_of(parameter) is None),
            **rooms,
        }
    states.jobs.extend(reading(directory, headers, targets, manifest.files))
    return states


def _on_device_of(
    parameter: nn.Parameter, optimizer: torch.optim.Optimizer, numbers: dict[str, Any], on_device: bool
) -> dict[str, Any]:
    """Move a state's small tensors, which were read into RAM, to the parameter's device if it is not streamed.

    Leaves "step", which only some of torch's kernels need there."""
    if not on_device:
        return numbers
    group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    keeps_step_there = bool(group.get("capturable") or group.get("fused"))

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(parameter.device)
        return [moved(item) for item in value] if isinstance(value, list) else value

    return {key: value if key == "step" and not keeps_step_there else moved(value) for key, value in numbers.items()}


def _groups_that_fit(
    durable: Durable, optimizer: torch.optim.Optimizer, names: Names, directory: Path, saved: dict[str, Any]
) -> list[dict[str, Any]]:
    """The saved settings of the groups, e.g. learning rates, if they are of the same optimizer; else none."""
    groups: list[dict[str, Any]] = saved["groups"]
    try:
        _check_optimizer(durable, optimizer, names, directory, saved)
    except WrongModel:
        return []
    return groups


def _warn_optimizer_restarts(directory: Path, optimizer: torch.optim.Optimizer, has_groups: bool) -> None:
    settings = "Learning rates and other settings are those" if has_groups else "Its settings are not those"
    say_once(
        f"{directory} was saved without the optimizer's states: {type(optimizer).__name__} starts again, with "
        f"zero moments. {settings} of the checkpoint."
    )


def _check_optimizer(
    durable: Durable, optimizer: torch.optim.Optimizer, names: Names, directory: Path, saved: dict[str, Any] | None
) -> None:
    here = type(optimizer).__name__
    if saved is None:
        raise WrongModel(
            f"{directory} has no optimizer state: it was saved from a session without an optimizer. Load the weights "
            "alone with load_weights."
        )
    there = " ".join(saved["class"][:80].split()) if isinstance(saved["class"], str) else "another kind of optimizer"
    if there != here:
        raise WrongModel(f"{directory} was saved with {there}, this session has {here}. Build the same optimizer.")
    if saved["masters"] and not durable.has_masters:
        raise WrongModel(f"{directory} was saved with fp32 masters. Give master_dtype=torch.float32 to storm.stream.")
    called = parameter_names(optimizer, names.tensors)
    groups = [[called[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    for number, (mine, theirs) in enumerate(zip(groups, [group["params"] for group in saved["groups"]], strict=False)):
        if mine != theirs:
            where = next((i for i, (a, b) in enumerate(zip_longest(mine, theirs)) if a != b), 0)
            raise WrongModel(
                f"{directory}: parameter group {number} held {len(theirs)} parameters and here holds {len(mine)}; the "
                f"first difference is number {where}. Build the optimizer as it was when saving."
            )
    if len(groups) != len(saved["groups"]):
        raise WrongModel(
            f"{directory} has {len(saved['groups'])} parameter groups, the optimizer here has {len(groups)}."
        )
    for group, theirs in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key in _FIXED:
            if group.get(key) != theirs.get(key):
                raise WrongModel(
                    f"{directory} was saved with {key}={theirs.get(key)}, the optimizer here has "
                    f"{key}={group.get(key)}. Build the same optimizer."
                )


def _check_values(directory: Path, optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    """Raise unless each setting has a valid type: otherwise torch would fail in the middle of a step."""
    for group, theirs in zip(optimizer.param_groups, saved, strict=bool(saved)):
        for key, value in theirs.items():
            fits = value is None or isinstance(value, bool) if key in _FLAGS else _is_like(group.get(key), value)
            if key != "params" and not fits:
                raise CheckpointError(
                    f"{directory / STATE} gives {key} as {str(value)[:40]!r}, which is not valid. Use another one."
                )


def _is_like(now: Any, then: Any) -> bool:
    if isinstance(now, tuple):
        return isinstance(then, tuple | list) and len(then) == len(now) and all(map(_is_like, now, then))
    if isinstance(now, float) or (isinstance(now, int) and not isinstance(now, bool)):
        return isinstance(then, int | float) or (isinstance(then, torch.Tensor) and then.numel() == 1)
    return True


def _is_count(value: Any) -> bool:
    """Whether it can be an optimizer's step count, which torch keeps as a tensor or as a number."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else None
    return isinstance(value, int | float) and 0 <= value < 1 << 53


def _set_groups(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    """Set them in place: schedulers hold the same dictionaries."""
    for group, theirs in zip(optimizer.param_groups, saved, strict=bool(saved)):
        for key, value in theirs.items():
            if key == "params":
                continue
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = value
