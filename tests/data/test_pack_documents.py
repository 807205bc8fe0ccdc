from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stormtorch import SettingError
from stormtorch.data import tokens
from stormtorch.data.packing.documents import DocumentReader
from stormtorch.data.packing.pack_documents import TokenOptions, pack_documents

from .reading import read_all


def flat(directory: Path, name: str = "tokens") -> list[int]:
    """One column of a packed directory of tokens, all shards after one another."""
    rows: list[int] = read_all(tokens(directory, sequence=1, extra=0))[name].flatten().tolist()
    return rows


def write_documents(path: Path, documents: list[Any]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


@settings(max_examples=20)
@given(documents=st.lists(st.lists(st.integers(0, 999), max_size=6), max_size=30), shard=st.integers(1, 60))
def test_documents_of_tokens(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], shard: int) -> None:
    directory = tmp_path_factory.mktemp("pack")
    path = write_documents(directory / "a.jsonl", [{"text": document} for document in documents])
    options = TokenOptions(tokenizer=None, end=7, dtype=torch.int32, mask=True, numbers=True)
    told = [document for document in documents if document]
    expected = [token for document in told for token in [*document, 7]]
    if not told:
        with pytest.raises(SettingError, match="no rows"):
            pack_documents([path], directory / "o", reader=DocumentReader(), options=options, shard_bytes=shard)
        return
    counts = pack_documents([path], directory / "o", reader=DocumentReader(), options=options, shard_bytes=shard)
    assert counts == (len(told), len(expected))
    assert flat(directory / "o") == expected
    assert flat(directory / "o", "loss_mask") == [1] * len(expected)
    numbers = [number for number, document in enumerate(told) for _ in [*document, 7]]
    assert flat(directory / "o", "documents") == numbers


def test_prompts_are_masked(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", [{"text": [1, 2], "p": [3]}, {"text": [4], "p": []}] * 1500)
    options = TokenOptions(tokenizer=None, end=0, dtype=torch.uint16, mask=True)
    reader = DocumentReader(prompt_field="p")
    pack_documents([path], tmp_path / "o", reader=reader, options=options, shard_bytes=1 << 20)
    assert flat(tmp_path / "o") == [3, 1, 2, 0, 4, 0] * 1500
    assert flat(tmp_path / "o", "loss_mask") == [0, 1, 1, 1, 1, 1] * 1500


def test_tokens_that_do_not_fit(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", [{"text": [1, 70000]}])
    options = TokenOptions(tokenizer=None, end=None, dtype=torch.uint16)
    with pytest.raises(SettingError, match="Token 70000 does not fit in uint16"):
        pack_documents([path], tmp_path / "o", reader=DocumentReader(), options=options, shard_bytes=100)
    write_documents(path, [{"text": [1 << 70]}])
    with pytest.raises(SettingError, match="does not fit in 64 bits"):
        pack_documents([path], tmp_path / "o", reader=DocumentReader(), options=options, shard_bytes=100)
    for dtype, words in ((None, "Give --dtype"), (torch.float32, "not a dtype of tokens")):
        with pytest.raises(SettingError, match=words):
            TokenOptions(tokenizer=None, end=None, dtype=dtype).chosen_dtype()
    write_documents(path, [{"text": "words"}])
    with pytest.raises(SettingError, match="--tokenizer"):
        pack_documents([path], tmp_path / "o", reader=DocumentReader(), options=options, shard_bytes=100)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.jsonl"]
