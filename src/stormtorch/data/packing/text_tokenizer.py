"""Text to tokens, by a ``tokenizers`` file or a Hugging Face tokenizer's directory."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.errors import SettingError, StormError
from ...memory.disk.contained import parse_json, read_small

# What a tokenizer.json without a configuration beside it calls the end of a document.
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class TextTokenizer:
    """``encode`` for many texts at once, ``end`` for the token between documents, ``largest`` for the dtype."""

    def __init__(self, path: Path) -> None:
        """Loads the tokenizer: from a JSON file of ``tokenizers``, or from a directory that holds one."""
        self.path = path
        file = path / "tokenizer.json" if path.is_dir() else path
        self._fast: Any = None
        self._slow: Any = None
        if file.is_file():
            self._fast = _load(path, "tokenizers", lambda module: module.Tokenizer.from_file(str(file)))
            self._fast.no_truncation()  # or documents would lose their ends, and be filled up to the longest
            self._fast.no_padding()
            vocabulary: dict[str, int] = self._fast.get_vocab(with_added_tokens=True)
            name = _configured_end(file.parent)
            ends = [name] if name is not None else [usual for usual in _USUAL_ENDS if usual in vocabulary]
            self.end = vocabulary.get(ends[0]) if len(ends) == 1 else None
        elif path.is_dir():
            self._slow = _load(
                path,
                "transformers",
                lambda module: module.AutoTokenizer.from_pretrained(
                    str(path), local_files_only=True, trust_remote_code=False
                ),
            )
            vocabulary = self._slow.get_vocab()
            self.end = self._slow.eos_token_id
        else:
            raise SettingError(f"--tokenizer {path} does not exist. Name a tokenizer.json, or the directory of one.")
        if not vocabulary:
            raise SettingError(f"--tokenizer {path} has an empty vocabulary. Name one that was trained.")
        self.largest = max(vocabulary.values())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, without special ones. Uses all cores."""
        if self._fast is not None:
            return [found.ids for found in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]
        found: list[list[int]] = self._slow(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return found


def _load(path: Path, package: str, load: Any) -> Any:
    try:
        return load(importlib.import_module(package))
    except ImportError as error:
        raise SettingError(
            f"--tokenizer {path} needs {package} ({error}). Install it: pip install {package}."
        ) from error
    except StormError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for whatever is wrong with a file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SettingError(
            f"--tokenizer {path} cannot be loaded ({reason}). Name a tokenizer.json, or the directory of one."
        ) from error


def _configured_end(directory: Path) -> str | None:
    """The end token that a Hugging Face configuration in ``directory`` names."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            found = parse_json(read_small(directory / name)).get("eos_token")
        except (OSError, ValueError, AttributeError):
            continue  # not there, or not what it should be: then --eos-id says it
        if isinstance(found, dict):
            found = found.get("content")
        if isinstance(found, str):
            return found
    return None
