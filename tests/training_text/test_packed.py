"""Law: a folder of ``storm data pack`` gives the rows that its text gives; what does not fit the model is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stormtorch.cli.main import main
from stormtorch.core.errors import SettingError, StorageError, StormError
from stormtorch.training.text import Prepared, input_bytes, prepare

from .made import DEMO_DATA, byte_tokenizer, json_lines, rows_of

pytest.importorskip("transformers")


def packed(folder: Path, source: Path, *more: str) -> Path:
    out = folder / f"packed-{len(list(folder.iterdir()))}"
    assert main(["data", "pack", str(source), "--out", str(out), "--tokenizer", str(DEMO_DATA), *more]) == 0
    return out


def made(folder: Path, *paths: Path, sequence: int = 8, **more: Any) -> Prepared:
    return prepare(paths, byte_tokenizer(), sequence=sequence, cache=folder / "cache", **more)


def text(folder: Path) -> Path:
    return json_lines(folder / "text.jsonl", *({"text": f"document number {index}"} for index in range(30)))


@pytest.mark.parametrize("shards", ["512MiB", "50"])
def test_the_rows_of_packed_tokens_are_those_of_the_text(tmp_path: Path, shards: str) -> None:
    folder = packed(tmp_path, text(tmp_path), "--shard-size", shards, "--document-numbers")
    for sequence in (2, 8, 1000):
        one = made(tmp_path, text(tmp_path), sequence=sequence)
        other = made(tmp_path, folder, sequence=sequence)
        assert rows_of(other) == rows_of(one)
        assert (other.fingerprint, other.tokens) == (one.fingerprint, one.tokens)
        assert made(tmp_path, folder, sequence=sequence).reused
    assert "packed: " in str(other)


def test_prompts_are_not_learnt(tmp_path: Path) -> None:
    """The mask says which; a row of a prompt alone is left out."""
    given = [{"prompt": "a" * (index % 20), "completion": "answer"} for index in range(40)]
    source = json_lines(tmp_path / "pairs.jsonl", *given)
    folder = packed(tmp_path, source, "--prompt-field", "prompt", "--text-field", "completion")
    one, other = made(tmp_path, source), made(tmp_path, folder, completions_only=True)
    assert rows_of(other) == rows_of(one)
    assert other.empty_rows == one.empty_rows > 0
    everything = made(tmp_path, folder, completions_only=False)
    assert rows_of(everything) == rows_of(made(tmp_path, source, completions_only=False))


def test_packed_rows_stay_rows(tmp_path: Path) -> None:
    ids = np.arange(40, dtype=np.int64).reshape(5, 8)
    labels = np.where(ids % 3 == 0, -100, ids)
    folder = rows_folder(tmp_path, input_ids=ids, labels=labels)
    assert rows_of(made(tmp_path, folder)) == (ids.tolist(), labels.tolist())
    alone = rows_folder(tmp_path, input_ids=ids.astype(np.uint16))
    assert rows_of(made(tmp_path, alone, alone)) == (ids.tolist() * 2, ids.tolist() * 2)


def rows_folder(folder: Path, **arrays: Any) -> Path:
    from stormtorch.data.packing.pack_rows import pack_rows, rows_to_pack

    number = len(list(folder.iterdir()))
    saved = folder / f"arrays-{number}"
    saved.mkdir()
    from safetensors.numpy import save_file

    save_file(arrays, saved / "rows.safetensors")
    fields, chunks, _ = rows_to_pack([saved], None)
    pack_rows(fields, chunks, folder / f"rows-{number}", shard_bytes=1 << 20, dtype=None, progress=lambda _: None)
    return folder / f"rows-{number}"


def test_what_is_refused(tmp_path: Path) -> None:
    source = text(tmp_path)
    folder = packed(tmp_path, source)
    ids = np.arange(40, dtype=np.int64).reshape(5, 8)
    rows = rows_folder(tmp_path, input_ids=ids)
    masked = rows_folder(tmp_path, input_ids=ids, attention_mask=ids)
    floats = rows_folder(tmp_path, input_ids=ids.astype(np.float32))
    negative = rows_folder(tmp_path, input_ids=ids - 1)
    labels = rows_folder(tmp_path, input_ids=ids, labels=ids + 100)
    for paths, more, words in (
        ((folder,), {"vocabulary": 200}, "token 256 is beyond the model's vocabulary of 200. It was packed with"),
        ((labels,), {"vocabulary": 60}, "token 139 is beyond the model's vocabulary of 60"),
        ((folder, source), {}, "is packed and .*text.jsonl is not. Name one kind"),
        ((folder,), {"packing": False}, "--no-packing is for text, and .* is packed"),
        ((folder,), {"format": "chat"}, "--format is for text"),
        ((folder,), {"text_field": "body"}, "--text-field is for text"),
        ((folder,), {"completions_only": True}, "does not mark prompts"),
        ((rows,), {"sequence": 4}, "rows of 8 tokens, and --sequence is 4. Give --sequence 8"),
        ((masked,), {}, "holds rows of 'attention_mask', 'input_ids'. Accepted: "),
        ((floats,), {}, "'input_ids' is float32"),
        ((negative,), {}, "token -1 is below 0"),
    ):
        with pytest.raises(StormError, match=words):
            made(tmp_path, *paths, **more)
    assert made(tmp_path, folder, vocabulary=257).largest_token == 256
    with pytest.raises(SettingError, match="beyond the model's vocabulary of 200"):  # from the cache too
        made(tmp_path, folder, vocabulary=200)


def test_damage_is_found_as_it_is_read(tmp_path: Path) -> None:
    folder = packed(tmp_path, text(tmp_path))
    file = folder / "00000-0.bin"
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(content)
    with pytest.raises(StorageError, match=r"00000-0\.bin is damaged: checksum"):
        made(tmp_path, folder)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert input_bytes([folder]) == len(content)


def test_a_damaged_cache_of_packed_tokens_is_made_again(tmp_path: Path) -> None:
    folder, said = packed(tmp_path, text(tmp_path)), list[str]()
    one = made(tmp_path, folder)
    expected, file = rows_of(one), one.arrays["input_ids"]
    content = bytearray(file.read_bytes())
    content[200] ^= 1
    file.write_bytes(content)
    again = made(tmp_path, folder, warn=said.append)
    assert not again.reused
    assert rows_of(again) == expected
    assert len(said) == 1
    assert "Making them again" in said[0]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.csv", "a,b\n", "Convert it: python -c .*l\\('csv', data_files='.*rows.csv'"),
        ("rows.parquet", "PAR1", "'parquet'"),
        ("a.jsonl", json.dumps({"instruction": "i", "input": "", "output": "o"}), "Convert it: jq -c '{prompt: "),
        ("s.jsonl", json.dumps({"conversations": [{"from": "human", "value": "v"}]}), "jq -c '{messages: "),
    ],
)
def test_other_forms_are_refused_with_a_way(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(StormError, match=words):
        made(tmp_path, tmp_path / name)
