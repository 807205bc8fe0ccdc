"""Causal language models of transformers, built so that their weights need memory only once.

A model with weights on disk is built on the meta device: its buffers are real, its parameters hold nothing. `stream`
gives them their homes, and the shards are then read straight into those. The road not taken: ``from_pretrained`` and
then `stream`; for a moment all weights would exist twice. It remains for folders whose names transformers has to
convert, which is said.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint.folder import check_as_model
from ...checkpoint.tensor_files import read_header
from ...core.errors import SettingError, StorageError, WrongModel
from ...core.sizes import MiB
from ...memory.disk.calls import storage_error
from ...memory.disk.contained import inside, opened, parse_json, read_small
from ..errors import reason, require
from .model_folder import CONFIG_LIMIT_BYTES, check_model_folder, has_value, read_plain, weight_map
from .own_model import Batch

INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
_FROM_THE_HUB = ("penalty_alpha", "dola_layers", "num_beam_groups", "constraints")  # ways that moved to repositories
_SAMPLE_BYTES = 4096
_SNAPSHOT = re.compile(r"/models--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})$")
_MOST_LAYERS = 10_000
_NO_NUMBERS = {"_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"}


def hf_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The model's own loss: the mean over tokens that are to be learnt."""
    loss: torch.Tensor = model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss
    return loss


def read_config(path: Path) -> Any:
    """The configuration in a model's directory, or in a JSON file."""
    transformers = require("transformers", extra="hf", why=f"--model {path}")
    file = _config_file(path)
    if not file.is_file():
        what = "has no config.json" if path.is_dir() else "does not exist"
        if (path / "adapter_config.json").is_file():
            what = "holds adapters and no model (peft's merge_and_unload makes one of both)"
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
                f"--model {path} is quantised, and such weights cannot be trained here. Name the original."
            )
        config = read_plain(transformers, file, given)
    except SettingError:
        raise
    except Exception as error:  # whatever a class of transformers raises for values that it does not like
        raise SettingError(f"--model {path}: {file.name} cannot be used: {reason(error)}. Correct it.") from error
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise SettingError(f"--model {path}: {file.name} says {layers} layers. Accepted: at most {_MOST_LAYERS}.")
    return config


def _config_file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def _download(path: Path) -> str:
    """What to do for what may be a name on the Hub: they are not looked up."""
    name = str(path)
    if path.exists() or path.is_absolute() or name.startswith(".") or name.count("/") != 1:
        return ""
    return f" Is it a name on the Hub? Fetch it first: hf download {name} --local-dir FOLDER."


def vocabulary(config: Any) -> int | None:
    """How many tokens the model knows."""
    found: int | None = getattr(config.get_text_config(), "vocab_size", None)
    return found


def check_positions(config: Any, sequence: int) -> str | None:
    """What is to be said of rows longer than the model knows. Raises SettingError where it has no such positions."""
    inner = config.get_text_config()
    known = getattr(inner, "max_position_embeddings", None)
    if not isinstance(known, int) or sequence <= known:
        return None
    if getattr(inner, "rope_parameters", None) is None:
        raise SettingError(f"sequence={sequence}, and the model has {known} positions. Use --sequence {known} or less.")
    return f"Rows of {sequence} tokens are longer than the {known} positions that the model was made for."


def hub_name(path: Path) -> tuple[str, str] | None:
    """The name and the revision of a model that lies in the Hub's cache, by its folder's name; None elsewhere.

    A config's own ``_name_or_path`` is no such name: in a model that was trained further it names the one before."""
    found = _SNAPSHOT.search(os.path.abspath(path))  # noqa: PTH100  # not resolved: a snapshot is what was named
    return (found["name"].replace("--", "/"), found["revision"]) if found is not None else None


def weight_files(path: Path) -> list[Path]:
    """The files with a model's weights, as an index names them, be they there or not; or whatever there is."""
    for kind in ("model.safetensors", "pytorch_model.bin"):
        index, single = path / f"{kind}.index.json", path / kind
        if index.is_file():
            return [inside(path, name) for name in sorted(set(weight_map(index).values()))]
        if single.is_file():
            return [inside(path, kind)]
    there = sorted(file.name for file in path.glob("*.safetensors") if not file.name.startswith("adapter_"))
    return [inside(path, name) for name in there]


def fingerprint(path: Path) -> str:
    """Of the weights in a folder, wherever it lies: names and sizes of the files, and how each of them ends."""
    found = hashlib.blake2b(digest_size=16)
    for file in weight_files(path):
        try:
            with opened(file) as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(size - MiB, 0))
                found.update(f"{file.name} {size} ".encode() + stream.read(MiB))
        except OSError as error:
            raise error if isinstance(error, StorageError) else storage_error(f"read {file}", error) from error
    return found.hexdigest()


def samples(path: Path) -> str:
    """Of the weights in a folder: a little of the beginning, the middle and the end of every tensor in safetensors. So
    a model that was trained further, or had adapters merged into it, is another one."""
    found = hashlib.blake2b(digest_size=16)
    for file in weight_files(path):
        if file.suffix != ".safetensors":
            continue  # pickles end with checksums, which the fingerprint has
        header = read_header(file)
        try:
            with opened(file) as stream:
                for name in sorted(header):
                    start, end = header[name].start, header[name].start + header[name].size
                    for at in (start, (start + end) // 2, max(start, end - _SAMPLE_BYTES)):
                        stream.seek(at)
                        found.update(stream.read(min(_SAMPLE_BYTES, end - at)))
        except OSError as error:
            raise error if isinstance(error, StorageError) else storage_error(f"read {file}", error) from error
    return found.hexdigest()


def values_in_config(path: Path) -> dict[str, Any]:
    """What the config's file says that may change a number. Not what this version of transformers adds to it: the next
    one adds other things."""
    file = _config_file(path)
    try:
        given: dict[str, Any] = dict(parse_json(read_small(file, limit_bytes=CONFIG_LIMIT_BYTES)))
    except (ValueError, TypeError) as error:
        raise SettingError(f"--model {path}: {file.name} cannot be used: {reason(error)}. Correct it.") from error
    return {name: value for name, value in given.items() if name not in _NO_NUMBERS}


def build_empty(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model without memory for its parameters, with real buffers. Uses no random numbers that matter."""
    transformers = require("transformers", extra="hf", why="This model")
    accelerate = require("accelerate", extra="hf", why="This model")
    initialization = require("transformers.initialization", extra="hf", why="This model")
    with _refused(config), accelerate.init_empty_weights(include_buffers=False), initialization.no_init_weights():
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(model.config, "is_decoder", False):
        raise SettingError(
            f"A model of type {config.model_type!r} looks at the tokens that it is to predict, unless its config says "
            '"is_decoder": true. Name a causal language model.'
        )
    model.tie_weights()
    model.train()
    return model  # type: ignore[no-any-return]  # transformers is an extra, so its types are not known here


def build_random(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model with random weights, as torch's seed has them."""
    transformers = require("transformers", extra="hf", why="This model")
    with _refused(config):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.train()
    return model  # type: ignore[no-any-return]


def build_in_ram(path: Path, config: Any, dtype: torch.dtype) -> nn.Module:
    """The model as transformers loads it, which would fill up what it does not find with random numbers."""
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
    except Exception as error:  # pickle's, torch's, safetensors': whatever reads the files
        raise StorageError(f"--model {path} cannot be loaded: {reason(error)}. Copy its files again.") from error
    missing = sorted(found["missing_keys"])
    if missing:
        raise WrongModel(
            f"--model {path}: {len(missing)} weights are not in its files, {missing[0]!r} among them. Copy them again; "
            "config.json must be that of these files."
        )
    model.train()
    return model  # type: ignore[no-any-return]


@contextlib.contextmanager
def _refused(config: Any) -> Iterator[None]:
    """Says what transformers has against building a model."""
    try:
        yield
    except Exception as error:  # ValueError for another kind of model, anything for numbers that do not go together
        raise SettingError(
            f"No causal language model can be built of a config of type {config.model_type!r}: {reason(error)}. "
            "Correct it, or name another --model."
        ) from error


def why_not_direct(model: nn.Module, path: Path) -> str | None:
    """Why the files cannot be read straight into ``model``, or None: their names are the model's own."""
    if weight_files(path)[0].suffix != ".safetensors":
        return "its weights are not safetensors"
    found = _names_in(path)
    tensors = model.state_dict(keep_vars=True)
    there = {id(tensors[name]) for name in found if name in tensors}  # a tied weight is there under one name
    foreign = sorted(found - tensors.keys())
    missing = sorted(name for name, tensor in tensors.items() if name not in found and id(tensor) not in there)
    if foreign or missing:
        first = f"{missing[0]} is not in the files" if missing else f"{foreign[0]} is not in the model"
        return f"its names need transformers' conversion ({first}; {len(missing)} missing, {len(foreign)} others)"
    return None


def _names_in(path: Path) -> set[str]:
    safetensors = require("safetensors", extra="hf", why=f"--model {path}")
    index = path / INDEX
    if index.is_file():
        return set(weight_map(index))
    names: set[str] = set()
    for file in weight_files(path):
        try:
            with safetensors.safe_open(str(file), framework="pt") as opened:
                names.update(opened.keys())
        except (OSError, safetensors.SafetensorError) as error:
            raise StorageError(f"{file} cannot be read ({reason(error)}). Copy it again.") from error
    return names


def take_generation_config(model: nn.Module, path: Path) -> None:
    """Let ``generate`` do what the model's directory says. Samples are greedy: what is only for others is left out.

    Some files of well-known models name a temperature without sampling, which transformers reads and refuses to write.
    """
    anything: Any = model
    if (path / GENERATION).is_file():
        transformers = require("transformers", extra="hf", why=f"--model {path}")
        try:
            anything.generation_config = transformers.GenerationConfig.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # transformers' own, for whatever stands there
            raise SettingError(f"{path / GENERATION} cannot be used: {reason(error)}. Correct it.") from error
    config = getattr(anything, "generation_config", None)
    if config is not None:
        config.do_sample = False
        for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", *_FROM_THE_HUB):
            setattr(config, name, None)


def copy_generation_config(path: Path, folder: Path) -> None:
    """A checkpoint generates as its model did."""
    if (path / GENERATION).is_file():
        (folder / GENERATION).write_bytes(read_small(inside(path, GENERATION)))
