"""Tokenises text with a ``tokenizers`` file or a Hugging Face tokenizer's directory."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import SettingError, StormError
from ...memory.disk.contained import parse_json, read_small

# Names of the end token in a tokenizer.json without a configuration beside it.
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class TextTokenizer:
    """``end``: the token between documents. ``largest``: the largest token, for the dtype."""

    def __init__(self, path: Path) -> None:
        """Load a JSON file of ``tokenizers``, or a directory that holds one."""
        self.path = path
        file = path / "tokenizer.json" if path.is_dir() else path
        self._fast: Any = None
        self._slow: Any = None
        if file.is_file():
            with _module_to_load(path, "tokenizers") as module:
                self._fast = module.Tokenizer.from_file(str(file))
            self._fast.no_truncation()  # a tokenizer's file may ask to truncate and pad documents
            self._fast.no_padding()
            vocabulary: dict[str, int] = self._fast.get_vocab(with_added_tokens=True)
            name = _configured_end(file.parent)
            ends = [name] if name is not None else [usual for usual in _USUAL_ENDS if usual in vocabulary]
            self.end = vocabulary.get(ends[0]) if len(ends) == 1 else None
        elif path.is_dir():
            with _module_to_load(path, "transformers") as module:
                load = module.AutoTokenizer.from_pretrained
                self._slow = load(str(path), local_files_only=True, trust_remote_code=False)
            vocabulary = self._slow.get_vocab()
            self.end = self._slow.eos_token_id
        else:
            raise SettingError(f"--tokenizer {path} does not exist. Name a tokenizer.json, or the directory of one.")
        if not vocabulary:
            raise SettingError(f"--tokenizer {path} has an empty vocabulary. Name a trained one.")
        self.largest = max(vocabulary.values())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, without special tokens. Uses all cores."""
        if self._fast is not None:
            return [found.ids for found in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]
        found: list[list[int]] = self._slow(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return found


@contextlib.contextmanager
def _module_to_load(path: Path, package: str) -> Iterator[Any]:
    """The package that reads ``path``. Raises its errors in the block as SettingError."""
    try:
        yield importlib.import_module(package)
    except ImportError as error:
        raise SettingError(
            f"--tokenizer {path} needs {package} ({error}). Install it: pip install {package}."
        ) from error
    except StormError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for all errors in a file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SettingError(
            f"--tokenizer {path} cannot be loaded ({reason}). Name a tokenizer.json, or the directory of one."
        ) from error


def _configured_end(directory: Path) -> str | None:
    """The end token in the Hugging Face configuration in ``directory``."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            found = parse_json(read_small(directory / name)).get("eos_token")
        except (OSError, ValueError, AttributeError):
            continue  # missing or invalid: the user gives --eos-id
        if isinstance(found, dict):
            found = found.get("content")
        if isinstance(found, str):
            return found
    return None
