"""Loads the tokenizer of a run: that of the model's directory, or the one that the user names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...core.errors import SettingError, StormError
from ...data.packing.text_tokenizer import TextTokenizer
from ..errors import reason, require
from ..settings.train_settings import TrainSettings
from .model_folder import check_model_folder


def load_tokenizer(settings: TrainSettings) -> Any:
    """A tokenizer of transformers, from a directory or a ``tokenizer.json``."""
    given = settings.tokenizer if settings.tokenizer is not None else settings.model
    assert given is not None
    path = Path(given)
    transformers = require("transformers", extra="hf", why="Reading text")
    if settings.tokenizer is None and not _may_hold_tokenizer(path):
        raise SettingError(
            f"--model {given} has no tokenizer. Give --tokenizer PATH, a tokenizer's directory or a tokenizer.json."
        )
    if not path.exists():
        raise SettingError(f"--tokenizer {given} does not exist. Name a tokenizer's directory, or a tokenizer.json.")
    try:
        if path.is_file() and not (path.parent / "tokenizer_config.json").is_file():
            return _bare(transformers, path)
        folder = path.parent if path.is_file() else path
        check_model_folder(folder)
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except StormError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for a file that it cannot read
        raise SettingError(f"No tokenizer can be read from {path}: {reason(error)}. Give --tokenizer PATH.") from error


def _may_hold_tokenizer(folder: Path) -> bool:
    """Whether it has a file of any kind of tokenizer. Without one, transformers' error is a list of guesses."""
    kinds = ("*token*", "vocab*", "merges.txt", "*.model", "*.spm", "*.bpe", "*.tiktoken")
    return any(any(folder.glob(kind)) for kind in kinds)


def _bare(transformers: Any, file: Path) -> Any:
    """A ``tokenizer.json`` without a configuration: finds the end token by its usual names."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    end = TextTokenizer(file).end
    if end is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    return tokenizer
