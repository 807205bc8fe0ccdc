"""Causal language models of transformers, built so that their weights need memory only once.

A model with weights on disk is built on the meta device: its buffers are real, its parameters hold nothing. `stream`
gives them their homes, and the shards are then read straight into those. The road not taken: ``from_pretrained`` and
then `stream`; for a moment all weights would exist twice. It remains for folders whose names transformers has to
convert, which is said.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.errors import SettingError, StorageError
from .extras import require
from .own_model import Batch

INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"


def hf_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The model's own loss: the mean over tokens that are to be learnt."""
    loss: torch.Tensor = model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss
    return loss


def read_config(path: Path) -> Any:
    """The configuration in a model's directory, or in a JSON file."""
    transformers = require("transformers", extra="hf", why=f"--model {path}")
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        what = "has no config.json" if path.is_dir() else "does not exist"
        raise SettingError(
            f"--model {path} {what}. Accepted: a model's directory, a config's JSON file, module:callable."
        )
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(given, dict) or "model_type" not in given:
            raise ValueError("it names no model_type")
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise SettingError(f"--model {path}: {file.name} cannot be used: {str(error).splitlines()[0]}.") from error
    if getattr(config, "quantization_config", None):
        raise SettingError(f"--model {path} is quantised, and such weights cannot be trained here. Name the original.")
    return config


def vocabulary(config: Any) -> int | None:
    """How many tokens the model knows."""
    found: int | None = getattr(config.get_text_config(), "vocab_size", None)
    return found


def has_weights(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.safetensors")) | any(path.glob("pytorch_model*.bin"))


def build_empty(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model without memory for its parameters, with real buffers. Uses no random numbers that matter."""
    transformers = require("transformers", extra="hf", why="This model")
    accelerate = require("accelerate", extra="hf", why="This model")
    initialization = require("transformers.initialization", extra="hf", why="This model")
    with accelerate.init_empty_weights(include_buffers=False), initialization.no_init_weights():
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    model.train()
    return model  # type: ignore[no-any-return]  # transformers is an extra, so its types are not known here


def build_random(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model with random weights, as torch's seed has them."""
    transformers = require("transformers", extra="hf", why="This model")
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.train()
    return model  # type: ignore[no-any-return]


def build_in_ram(path: Path, dtype: torch.dtype) -> nn.Module:
    """The model as transformers loads it."""
    transformers = require("transformers", extra="hf", why=f"--model {path}")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, local_files_only=True)
    model.train()
    return model  # type: ignore[no-any-return]


def why_not_direct(model: nn.Module, path: Path) -> str | None:
    """Why the files cannot be read straight into ``model``, or None: their names are the model's own."""
    if not any(path.glob("*.safetensors")):
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
        try:
            return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{index} is damaged ({error}). Copy it again.") from error
    names: set[str] = set()
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safetensors.safe_open(str(file), framework="pt") as opened:
                names.update(opened.keys())
        except (OSError, safetensors.SafetensorError) as error:
            raise StorageError(f"{file} cannot be read ({error}). Copy it again.") from error
    return names


def take_generation_config(model: nn.Module, path: Path) -> None:
    """Let ``generate`` do what the model's directory says. Samples are greedy: what is only for others is left out.

    Some files of well-known models name a temperature without sampling, which transformers reads and refuses to write.
    """
    anything: Any = model
    if (path / GENERATION).is_file():
        transformers = require("transformers", extra="hf", why=f"--model {path}")
        anything.generation_config = transformers.GenerationConfig.from_pretrained(str(path), local_files_only=True)
    config = getattr(anything, "generation_config", None)
    if config is not None:
        config.do_sample = False
        for name in ("temperature", "top_k", "top_p", "min_p", "typical_p"):
            setattr(config, name, None)


def copy_generation_config(path: Path, folder: Path) -> None:
    """A checkpoint generates as its model did."""
    if (path / GENERATION).is_file():
        (folder / GENERATION).write_bytes((path / GENERATION).read_bytes())
