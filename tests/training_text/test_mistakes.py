"""What is wrong with data is said in one line, with file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stormtorch import StormError
from stormtorch.training.text import prepare

from .made import CHAT, byte_tokenizer, json_lines

pytest.importorskip("transformers")
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def refused(paths: list[Path], tokenizer: Any, **settings: Any) -> str:
    cache = paths[0].parent / "cache"
    with pytest.raises(StormError) as caught:
        prepare(paths, tokenizer, cache=cache, **{"sequence": 16, **settings})
    assert "\n" not in str(caught.value)
    assert not list(cache.glob(".*writing*"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{'text': 1}", ["not JSON"]),
        (b'{"text": "a"', ["not JSON (Expecting ',' delimiter at column 13)"]),
        (b'{"text": "a', ["not JSON (Unterminated string starting at column 10)"]),
        (b'{"text": [{"role": "user"}]}', ["'text' is a list of messages", '{"messages": [...]}']),
        (b"[1, 2]", ["a JSON array, not an object", "jq -c"]),
        (b"[", ["a JSON array, not an object"]),
        (b'{"txt": "a"}', ["no field 'text'", "'txt'"]),
        (b'{"text": 3}', ["'text'", "int"]),
        (b'{"text": ["a"]}', ["'text'", "list"]),
        (b'{"text": ""}', ["'text' is empty"]),
        (b'{"text": "\xff"}', ["not UTF-8 at byte 10"]),
        (b'{"text": "abc \\ud83c"}', ["character 5 is '\\ud83c', a lone surrogate"]),
        (b'{"text": [1, -5]}', ["token -5"]),
        (b'{"text": [99999999999]}', ["does not fit in 32 bits"]),
        (b'{"text": [257]}', ["token 257", "vocabulary of 257"]),
    ],
)
def test_a_bad_line(tmp_path: Path, line: bytes, words: list[str]) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n')
    said = refused([path], byte_tokenizer(), vocabulary=257)
    assert said.startswith(f"{path}, line 3: "), said
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": []}, "not a list of messages"),
        ({"messages": "hello"}, "not a list of messages"),
        ({"messages": [{"content": "a"}]}, "message 1 is not an object with a 'role'"),
        ({"messages": [*TALK, {"role": "user", "content": 3}]}, "'content' of message 3 is int"),
        ({"messages": TALK[:1]}, "no turn of the assistant"),
        ({"text": "a"}, "no field 'messages'"),
    ],
)
def test_a_bad_conversation(tmp_path: Path, record: object, words: str) -> None:
    path = json_lines(tmp_path / "data.jsonl", {"messages": TALK}, record)
    said = refused([path], byte_tokenizer(CHAT))
    assert said.startswith(f"{path}, line 2: "), said
    assert words in said


def test_what_a_template_refuses(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system!') }}{% endif %}"
    template += "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    path = json_lines(tmp_path / "data.jsonl", {"messages": [{"role": "system", "content": "x"}, *TALK]})
    assert "line 1: the chat template refuses the conversation (No system!)" in refused(
        [path], byte_tokenizer(template)
    )


def test_a_tokenizer_without_template(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "data.jsonl", {"messages": TALK})
    assert "no chat template" in refused([path], byte_tokenizer())


def test_a_bad_completion(tmp_path: Path) -> None:
    good = {"prompt": "a", "completion": "b"}
    for bad, words in (
        ({"prompt": "a"}, "no field 'completion'"),
        ({"prompt": "a", "completion": ""}, "'completion' is empty"),
        ({"prompt": "a", "completion": [1]}, "the other tokens"),
    ):
        path = json_lines(tmp_path / "data.jsonl", good, bad)
        said = refused([path], byte_tokenizer())
        assert said.startswith(f"{path}, line 2: ")
        assert words in said


def test_the_tokenizer_of_another_model(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "data.jsonl", {"text": "abc"}, {"text": "xyz"})
    said = refused([path], byte_tokenizer(), vocabulary=110)
    assert said.startswith(f"{path}, line 1: token 256 is beyond the model's vocabulary of 110, the tokenizer has 257.")
    prepare([path], byte_tokenizer(), sequence=4, cache=tmp_path / "cache")
    said = refused([path], byte_tokenizer(), vocabulary=110, sequence=4)  # also where the tokens lie there already
    assert "token 256 is beyond the model's vocabulary of 110" in said


def test_files_that_are_none(tmp_path: Path) -> None:
    empty, blank, other = tmp_path / "e.jsonl", tmp_path / "b.jsonl", tmp_path / "o.csv"
    empty.touch()
    blank.write_text("\n\n")
    other.write_text("a,b")
    (tmp_path / "nothing").mkdir()
    tokenizer = byte_tokenizer()
    assert f"{empty} is empty" in refused([empty], tokenizer)
    assert f"{blank} holds no document" in refused([blank], tokenizer)
    assert f"{other} is neither JSON lines nor text" in refused([other], tokenizer)
    assert "does not exist" in refused([tmp_path / "missing.jsonl"], tokenizer)
    (tmp_path / "nothing" / "folder.jsonl").mkdir()
    (tmp_path / "nothing" / "._copied.jsonl").write_bytes(b"\0\5\x16\7")  # what a Mac leaves beside files
    assert "holds no data" in refused([tmp_path / "nothing"], tokenizer)


def test_text_without_a_tokenizer_or_end(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "data.jsonl", {"text": "abc"})
    assert f"{path}, line 1: text needs a tokenizer" in refused([path], None)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    assert "eos_token" in refused([path], tokenizer)


def test_settings(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "data.jsonl", {"text": "abc"})
    assert "--sequence" in refused([path], byte_tokenizer(), sequence=1)
    mixed = tmp_path / "b.txt"
    mixed.write_text("plain")
    chat = json_lines(tmp_path / "c.jsonl", {"prompt": "a", "completion": "b"})
    assert f"{mixed}, from line 1: plain text" in refused([chat, mixed], byte_tokenizer())
