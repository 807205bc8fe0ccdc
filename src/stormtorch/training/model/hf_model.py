"""Causal language models of transformers, built so that their weights need memory only once.

A model with weights on disk is built on the meta device: its buffers are real, its parameters have no memory. `stream`
gives them home memory, and the shards are then read straight into it. The road not taken: ``from_pretrained`` and then
`stream`, which needs all weights twice for a moment. It remains for folders whose names transformers must convert; the
run says so.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint.content.parts import INDEX
from ...checkpoint.files.tensor_files import read_header
from ...checkpoint.folders.manifest import check_as_model
from ...checkpoint.loading.weights import weight_map
from ...core.errors import SettingError, StorageError, WrongModel
from ...core.sizes import MiB
from ...memory.disk.calls import storage_errors
from ...memory.disk.contained import inside, opened, parse_json, read_small
from ..errors import reason, require
from .model_folder import CONFIG_LIMIT_BYTES, check_model_folder, has_value, read_plain
from .own_model import Batch

GENERATION = "generation_config.json"
_FROM_THE_HUB = ("penalty_alpha", "dola_layers", "num_beam_groups", "constraints")  # methods that moved to the Hub
_SAMPLE_BYTES = 4096
_SNAPSHOT = re.compile(r"/models--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})$")
_MAX_LAYERS = 10_000
_NO_NUMBERS = {"_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"}


def hf_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The model's own loss: the mean over trained tokens."""
    loss: torch.Tensor = model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss
    return loss


def read_config(path: Path) -> Any:
    """The configuration in a model's directory, or in a JSON file."""
    transformers = require("transformers", extra="hf", why=f"--model {path}")
    file = _config_file(path)
    if not file.is_file():
        what = "has no config.json" if path.is_dir() else "does not exist"
        if (path / "adapter_config.json").is_file():
            what = "holds adapters and no model (peft's merge_and_unload merges both)"
        raise SettingError(
            f"--model {path} {what}. Accepted: a model's directory, on this machine; a config's JSON file; "
            f"module:callable.{_download(path)}"
        )
    check_model_folder(path)
    try:
        given = parse_json(read_small(file, limit_bytes=CONFIG_LIMIT_BYTES))
        if not isinstance(given, dict) or "model_type" not in given:
            raise ValueError("it names no model_type")
        if has_value(given, "quantization_config"):
            raise SettingError(
                f"--model {path} is quantised, and STORM does not train such weights. Name the original."
            )
        config = read_plain(transformers, file, given)
    except SettingError:
        raise
    except Exception as error:  # a config class of transformers may raise anything for invalid values
        raise SettingError(f"--model {path}: {file.name} cannot be used: {reason(error)}. Correct it.") from error
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > _MAX_LAYERS:
        raise SettingError(f"--model {path}: {file.name} says {layers} layers. Accepted: at most {_MAX_LAYERS}.")
    return config


def _config_file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def _download(path: Path) -> str:
    """The remedy if the path may be a name on the Hub, which STORM never accesses."""
    name = str(path)
    if path.exists() or path.is_absolute() or name.startswith(".") or name.count("/") != 1:
        return ""
    return f" Is it a name on the Hub? Fetch it first: hf download {name} --local-dir FOLDER."


def positions(config: Any) -> int | None:
    """The positions that the model was made for."""
    known = getattr(config.get_text_config(), "max_position_embeddings", None)
    return known if isinstance(known, int) else None


def check_positions(config: Any, sequence: int) -> str | None:
    """A warning for rows longer than the model was made for. Raises SettingError if it has no such positions."""
    known = positions(config)
    if known is None or sequence <= known:
        return None
    if getattr(config.get_text_config(), "rope_parameters", None) is None:
        raise SettingError(f"sequence={sequence}: the model has {known} positions. Use --sequence {known} or less.")
    return f"Rows of {sequence} tokens are longer than the {known} positions that the model was made for."


def hub_name(path: Path) -> tuple[str, str] | None:
    """The name and the revision of a model in the Hub's cache, by its folder's name; None for other folders.

    A config's ``_name_or_path`` does not serve: in a fine-tuned model it names the original."""
    found = _SNAPSHOT.search(os.path.abspath(path))  # noqa: PTH100  # not resolved: snapshots hold links
    return (found["name"].replace("--", "/"), found["revision"]) if found is not None else None


def weight_files(path: Path) -> list[Path]:
    """The files with a model's weights: those that an index names, present or not; else those in the folder."""
    for kind in ("model.safetensors", "pytorch_model.bin"):
        index, single = path / f"{kind}.index.json", path / kind
        if index.is_file():
            return [inside(path, name) for name in sorted(set(weight_map(index).values()))]
        if single.is_file():
            return [inside(path, kind)]
    there = sorted(file.name for file in path.glob("*.safetensors") if not file.name.startswith("adapter_"))
    return [inside(path, name) for name in there]


def fingerprint(path: Path) -> str:
    """A hash of the weights in a folder: names and sizes of the files, and the last MiB of each."""
    found = hashlib.blake2b(digest_size=16)
    for file in weight_files(path):
        with storage_errors(f"read {file}"), opened(file) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(size - MiB, 0))
            found.update(f"{file.name} {size} ".encode() + stream.read(MiB))
    return found.hexdigest()


def samples(path: Path) -> str:
    """A hash of samples of the weights: the beginning, middle and end of every tensor in safetensors.

    It detects a model that was trained further, or that had adapters merged into it."""
    found = hashlib.blake2b(digest_size=16)
    for file in weight_files(path):
        if file.suffix != ".safetensors":
            continue  # pickles end with checksums, which the fingerprint covers
        header = read_header(file)
        with storage_errors(f"read {file}"), opened(file) as stream:
            for name in sorted(header):
                start, end = header[name].start, header[name].start + header[name].size
                for at in (start, (start + end) // 2, max(start, end - _SAMPLE_BYTES)):
                    stream.seek(at)
                    found.update(stream.read(min(_SAMPLE_BYTES, end - at)))
    return found.hexdigest()


def values_in_config(path: Path) -> dict[str, Any]:
    """The values in the config's file, which ``read_config`` has checked, that may change a number.

    Not those that transformers adds: they differ between its versions."""
    given: dict[str, Any] = parse_json(read_small(_config_file(path), limit_bytes=CONFIG_LIMIT_BYTES))
    return {name: value for name, value in given.items() if name not in _NO_NUMBERS}


def build_empty(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model without memory for its parameters, with real buffers. Initialises no weights. Where the system refuses
    to reserve the memory of one parameter, even for the moment until it is dropped, buffers have no memory either."""
    transformers, accelerate, initialization = (
        require(name, extra="hf", why="This model")
        for name in ("transformers", "accelerate", "transformers.initialization")
    )
    with initialization.no_init_weights():
        try:
            with accelerate.init_empty_weights(include_buffers=False):
                model = _from_config(config, dtype)
        except SettingError as error:
            if "can't allocate memory" not in str(error.__cause__):
                raise
            with torch.device("meta"):
                model = _from_config(config, dtype)
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(model.config, "is_decoder", False):
        raise SettingError(
            f"A model of type {config.model_type!r} sees the tokens that it predicts, unless its config says "
            '"is_decoder": true. Name a causal language model.'
        )
    model.tie_weights()
    return model.train()  # type: ignore[no-any-return]  # transformers is an extra: its types are unknown


def build_random(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model with random weights, by torch's seed."""
    return _from_config(config, dtype).train()  # type: ignore[no-any-return]


def _from_config(config: Any, dtype: torch.dtype) -> Any:
    """The model as transformers builds it; raises SettingError if it cannot."""
    transformers = require("transformers", extra="hf", why="This model")
    try:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # ValueError for another kind of model, anything for inconsistent numbers
        raise SettingError(
            f"No causal language model can be built from a config of type {config.model_type!r}: {reason(error)}. "
            "Correct it, or name another --model."
        ) from error


def build_in_ram(path: Path, config: Any, dtype: torch.dtype) -> nn.Module:
    """The model as transformers loads it. Refuses missing weights, which transformers would initialise randomly."""
    transformers = require("transformers", extra="hf", why=f"--model {path}")
    if (path / "adapter_config.json").exists():
        raise SettingError(
            f"--model {path} holds adapters beside a model, and transformers would load them too. Move "
            "adapter_config.json away, or merge them first."
        )
    check_as_model(path, tensors=True)
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            str(path),
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            weights_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # from pickle, torch or safetensors
        raise StorageError(f"--model {path} cannot be loaded: {reason(error)}. Copy its files again.") from error
    missing = sorted(found["missing_keys"])
    if missing:
        raise WrongModel(
            f"--model {path}: {len(missing)} weights are not in its files, {missing[0]!r} among them. Copy them again; "
            "config.json must be that of these files."
        )
    return model.train()  # type: ignore[no-any-return]


def why_not_direct(model: nn.Module, path: Path) -> str | None:
    """Why the files cannot be read straight into ``model``; None if their names are the model's."""
    if weight_files(path)[0].suffix != ".safetensors":
        return "its weights are not safetensors"
    found = set(weight_map(path / INDEX)) if (path / INDEX).is_file() else set()
    for file in [] if found else weight_files(path):
        found.update(read_header(file))
    tensors = model.state_dict(keep_vars=True)
    there = {id(tensors[name]) for name in found if name in tensors}  # files hold a tied weight under one name
    foreign = sorted(found - tensors.keys())
    missing = sorted(name for name, tensor in tensors.items() if name not in found and id(tensor) not in there)
    if foreign or missing:
        first = f"{missing[0]} is not in the files" if missing else f"{foreign[0]} is not in the model"
        return f"its names need transformers' conversion ({first}; {len(missing)} missing, {len(foreign)} others)"
    return None


def take_generation_config(model: nn.Module, path: Path) -> None:
    """Set the generation config of the model's directory. Samples are greedy, so it drops settings of other methods.

    Files of some well-known models set a temperature without sampling, which transformers reads but refuses to write.
    """
    anything: Any = model
    if (path / GENERATION).is_file():
        transformers = require("transformers", extra="hf", why=f"--model {path}")
        try:
            anything.generation_config = transformers.GenerationConfig.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # transformers may raise anything
            raise SettingError(f"{path / GENERATION} cannot be used: {reason(error)}. Correct it.") from error
    config = getattr(anything, "generation_config", None)
    if config is not None:
        config.do_sample = False
        for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", *_FROM_THE_HUB):
            setattr(config, name, None)


def copy_generation_config(path: Path, folder: Path) -> None:
    """Copy the generation config into a checkpoint's folder."""
    if (path / GENERATION).is_file():
        (folder / GENERATION).write_bytes(read_small(inside(path, GENERATION)))
