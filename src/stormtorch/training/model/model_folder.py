"""Checks a model's folder, which may be untrusted: nothing in it may run code, access the Hub or lead out of it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from ...checkpoint.folders.manifest import check_as_model
from ...checkpoint.loading.weights import weight_map
from ...core.notices import say_once
from ...core.sizes import MiB
from ...memory.disk.calls import storage_errors
from ...memory.disk.contained import inside, parse_json, read_small

CONFIG_LIMIT_BYTES = 64 * MiB
_READ_FOLDERS = ("additional_chat_templates",)
_READ_KINDS = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".spm", ".bpe", ".tiktoken"}
_FOR_CODE = {"auto_map", "trust_remote_code", "custom_pipelines", "transformers_weights", "configuration_files"}
_EXPERTS = (None, "eager", "batched_mm", "grouped_mm")
_KERNELS: dict[str, tuple[object, ...]] = {  # PyTorch's own: any other name may be one on the Hub
    "attn_implementation": (None, "eager", "sdpa"),
    "_attn_implementation": (None, "eager", "sdpa"),
    "_attn_implementation_internal": (None, "eager", "sdpa"),
    "experts_implementation": _EXPERTS,
    "_experts_implementation": _EXPERTS,
    "_experts_implementation_internal": _EXPERTS,
    "kernel_config": (None,),
    "use_kernels": (None, False),
}


def read_plain(transformers: Any, file: Path, given: dict[str, Any]) -> Any:
    """The config without values that would make transformers run code, or fetch code or kernels from the Hub."""
    kept, left_out = without_code(given)
    if "auto_map" in left_out and given["model_type"] not in transformers.CONFIG_MAPPING:
        raise ValueError(f"model_type {str(given['model_type'])[:40]!r} needs custom code, which STORM does not run")
    with tempfile.TemporaryDirectory() as folder:
        plain = file
        if left_out:
            plain = Path(folder) / "config.json"
            plain.write_text(json.dumps(kept), encoding="utf-8")
            chosen = sorted(name for name in left_out if name not in _FOR_CODE)
            if chosen:
                say_once(f"{file} chooses {', '.join(chosen)}; STORM ignores that and uses PyTorch's own kernels.")
        config = transformers.AutoConfig.from_pretrained(str(plain), local_files_only=True, trust_remote_code=False)
    config.name_or_path = str(file)
    return config


def without_code(given: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """A config, and configs in it, without names that choose code; and those names that had a value."""
    kept: dict[str, Any] = {}
    left_out: set[str] = set()
    for name, value in given.items():
        if name in _FOR_CODE or (name in _KERNELS and value not in _KERNELS[name]):
            left_out |= {name} if value is not None else set()
        elif isinstance(value, dict):
            kept[name], more = without_code(value)
            left_out |= more
        else:
            kept[name] = value
    return kept, left_out


def has_value(given: dict[str, Any], name: str) -> bool:
    """Whether a config, or a config in it, has a value of that name."""
    inner = [value for value in given.values() if isinstance(value, dict)]
    return bool(given.get(name)) or any(has_value(value, name) for value in inner)


def check_model_folder(path: Path) -> None:
    """Raise if a link or an index in a model's folder leads out of it, or a checkpoint's small files are damaged."""
    if not path.is_dir():
        return
    with storage_errors(f"read {path}"):
        for entry in sorted(path.iterdir()):
            if entry.is_symlink() and (entry.suffix in _READ_KINDS or entry.name in _READ_FOLDERS):
                inside(path, entry.name)
        for folder in _READ_FOLDERS:
            for entry in path.glob(f"{folder}/*"):
                inside(path, f"{folder}/{entry.name}")
        for index in path.glob("*.index.json"):
            for name in set(weight_map(index).values()):
                inside(path, name)
        tokenizer = path / "tokenizer_config.json"
        if tokenizer.is_file():
            _check_named_files(tokenizer)
    check_as_model(path)


def _check_named_files(config: Path) -> None:
    """Refuse files outside: old versions of transformers open any file that a tokenizer's configuration names."""
    try:
        given = parse_json(read_small(config, limit_bytes=CONFIG_LIMIT_BYTES))
    except ValueError:
        return  # loading the tokenizer reports it better
    for name, value in given.items() if isinstance(given, dict) else ():
        if name.endswith("_file") and isinstance(value, str) and os.path.exists(config.parent / value):  # noqa: PTH110
            inside(config.parent, value)
