from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stormtorch import SettingError
from stormtorch.data.packing.pack_documents import TokenOptions
from stormtorch.data.packing.text_tokenizer import TextTokenizer

tokenizers = pytest.importorskip("tokenizers")
WORDS = ["[UNK]", "the", "cat", "sat", "<|endoftext|>"]


def save(path: Path, words: list[str], **options: Any) -> Path:
    """A tokenizer whose tokens are words."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if options.get("truncation"):
        made.enable_truncation(2)
        made.enable_padding()
    made.save(str(path))
    return path


def test_a_file_of_tokenizers(tmp_path: Path) -> None:
    found = TextTokenizer(save(tmp_path / "t.json", WORDS, truncation=True))
    assert found.encode(["the cat sat", "", "dog"]) == [[1, 2, 3], [], [0]]
    assert (found.end, found.largest) == (4, 4)


@pytest.mark.parametrize("form", ["name", "object"])
def test_a_directory_says_its_end(tmp_path: Path, form: str) -> None:
    save(tmp_path / "tokenizer.json", [*WORDS, "</s>", "stop"])
    assert TextTokenizer(tmp_path).end is None  # two usual ones: the end is ambiguous
    end = "stop" if form == "name" else {"content": "stop", "lstrip": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    assert TextTokenizer(tmp_path).end == 6
    assert TextTokenizer(tmp_path / "tokenizer.json").end == 6


def test_a_directory_that_only_transformers_can_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    del transformers
    found = TextTokenizer(tmp_path)
    assert found.encode(["the cat"]) == [[5, 6]]
    assert found.largest == 6


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: d / "no.json", ["no.json", "does not exist"]),
        (lambda d: (d / "bad.json").write_text("{") and d / "bad.json", ["bad.json", "cannot be loaded"]),
        (lambda d: d, ["cannot be loaded"]),
    ],
)
def test_what_is_no_tokenizer(tmp_path: Path, make: Any, words: list[str]) -> None:
    with pytest.raises(SettingError) as caught:
        TextTokenizer(make(tmp_path))
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(("largest", "dtype"), [(65535, torch.uint16), (65536, torch.int32)])
def test_the_smallest_dtype_that_fits(tmp_path: Path, largest: int, dtype: torch.dtype) -> None:
    found = TextTokenizer(save(tmp_path / "t.json", WORDS))
    found.largest = largest
    assert TokenOptions(tokenizer=found, end=4, dtype=None).chosen_dtype() == dtype
