"""Chats and completions: exactly the answers are learnt, whatever the template does around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stormtorch import SettingError
from stormtorch.training.text import prepare

from .made import CHAT, END, byte_tokenizer, json_lines, learnt, rows_of

pytest.importorskip("transformers")

TWO_TURNS = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "First."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Second."},
]
# Rewrites a turn once others follow it: the last answer is preceded by an empty thought, earlier ones are not.
THOUGHTFUL = (
    "{% for message in messages %}<|im|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think></think>\n{% endif %}"
    "{{ message.content.split('</think>')[-1].lstrip() if not loop.last else message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im|>assistant\n{% endif %}"
)
# No generation prompt, the end token right behind the answer, system words inside the first question.
BRACKETS = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content }}<|end|>{% endif %}{% endfor %}"
)
MARKED = (
    "{% for message in messages %}<|im|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}<|end|>\n{% endfor %}"
)


def prepared(tmp_path: Path, tokenizer: Any, *records: object, **settings: Any) -> tuple[list[str], list[str]]:
    """What is learnt of the first row, in runs, and the texts of all rows."""
    path = json_lines(tmp_path / "a.jsonl", *records)
    settings = {"sequence": 120, "packing": False, "cache": tmp_path / "cache", **settings}
    ids, labels = rows_of(prepare([path], tokenizer, **settings))
    return learnt(tokenizer, labels[0]), [tokenizer.decode(row) for row in ids]


def test_completions(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    record = {"prompt": "Größe? ", "completion": "Zwölf."}
    runs, texts = prepared(tmp_path, tokenizer, record)
    assert runs == ["Zwölf.<|end|>"]
    assert texts[0].startswith("Größe? Zwölf.<|end|>")
    runs, _ = prepared(tmp_path, tokenizer, record, completions_only=False)
    assert runs == ["Größe? Zwölf.<|end|>"]
    assert prepared(tmp_path, tokenizer, {"prompt": "", "completion": "x"})[0] == ["x<|end|>"]


def test_a_token_across_the_border_is_learnt(tmp_path: Path) -> None:
    """Otherwise the first characters of the answer would never be."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "a": 1, "b": 2, "c": 3, "ab": 4, "<|end|>": 5}
    made = Tokenizer(models.BPE(words, [("a", "b")], unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")  # type: ignore[no-untyped-call]  # transformers' own
    path = json_lines(tmp_path / "a.jsonl", {"prompt": "ca", "completion": "bc"})
    ids, labels = rows_of(prepare([path], tokenizer, sequence=4, cache=tmp_path / "cache"))
    assert ids == [[3, 4, 3, 5]]
    assert labels == [[-100, 4, 3, 5]]


class WithoutOffsets:
    """A tokenizer written in Python, as some of transformers are: it cannot say where a token came from."""

    is_fast = False
    eos_token_id = pad_token_id = END
    chat_template = None

    def __call__(self, texts: list[str], **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(text.encode()) for text in texts]}

    def get_vocab(self) -> dict[str, int]:
        return {chr(number): number for number in range(257)}

    def __len__(self) -> int:
        return 257


def test_a_tokenizer_without_offsets_cannot_tell_answers_from_prompts(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", {"prompt": "ab", "completion": "cd"})
    with pytest.raises(SettingError, match=r"line 1: .* WithoutOffsets does not say\. .* --no-completions-only"):
        prepare([path], WithoutOffsets(), sequence=5, cache=tmp_path / "cache")
    made = prepare([path], WithoutOffsets(), sequence=5, cache=tmp_path / "cache", completions_only=False)
    assert rows_of(made)[0] == [[*b"abcd", END]]


@pytest.mark.parametrize("template", [CHAT, THOUGHTFUL], ids=["plain", "rewriting"])
def test_only_the_assistant_is_learnt(tmp_path: Path, template: str) -> None:
    tokenizer = byte_tokenizer(template)
    runs, texts = prepared(tmp_path, tokenizer, {"messages": TWO_TURNS})
    thought = "<think></think>\n" if template is THOUGHTFUL else ""
    assert runs == ["First.<|end|>", f"{thought}Second.<|end|>"]  # also what the model has to say before its answer
    expected = tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)
    assert texts[0].startswith(expected + "<|end|>")  # and nothing before it, or between: the rest is filling


def test_a_template_without_a_generation_prompt(tmp_path: Path) -> None:
    runs, texts = prepared(tmp_path, byte_tokenizer(BRACKETS), {"messages": TWO_TURNS})
    assert runs == [" First.<|end|>", " Second.<|end|>"]
    assert texts[0].startswith("[INST] One? [/INST] First.<|end|>[INST] Two?")


def test_answers_that_are_also_in_the_questions(tmp_path: Path) -> None:
    """Found by where they stand, not by what they say."""
    echo = [{"role": role, "content": "same"} for role in ("user", "assistant", "user", "assistant")]
    for template in (CHAT, THOUGHTFUL):
        tokenizer = byte_tokenizer(template)
        path = json_lines(tmp_path / "echo.jsonl", {"messages": echo})
        made = prepare([path], tokenizer, sequence=120, packing=False, cache=tmp_path / "cache")
        ids, labels = rows_of(made)
        text = tokenizer.decode(ids[0])
        first = [at for at in range(1, 120) if labels[0][at] != -100 and labels[0][at - 1] == -100]
        assert len(first) == 2
        assert all(tokenizer.decode(ids[0][:at]).endswith("<|im|>assistant\n") for at in first), text


def test_a_thought_that_the_template_drops(tmp_path: Path) -> None:
    messages = [{**message} for message in TWO_TURNS]
    messages[1]["content"] = "hmm</think>First."
    runs, _ = prepared(tmp_path, byte_tokenizer(THOUGHTFUL), {"messages": messages})
    assert runs == ["First.<|end|>", "<think></think>\nSecond.<|end|>"]


def test_a_template_with_marks_of_its_own(tmp_path: Path) -> None:
    runs, _ = prepared(tmp_path, byte_tokenizer(MARKED), {"messages": TWO_TURNS})
    assert runs == ["First.", "Second."]


def test_the_assistant_speaks_first_and_twice(tmp_path: Path) -> None:
    turns = [{"role": "assistant", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
    runs, _ = prepared(tmp_path, byte_tokenizer(CHAT), {"messages": turns})
    assert runs[-1] == "Hello<|end|>"
    assert len(runs) == 2


def test_the_whole_conversation(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(CHAT)
    runs, _ = prepared(tmp_path, tokenizer, {"messages": TWO_TURNS}, completions_only=False)
    assert runs == [tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)]


def test_packed_conversations(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(CHAT)
    path = json_lines(tmp_path / "a.jsonl", *({"messages": TWO_TURNS} for _ in range(3)))
    made = prepare([path], tokenizer, sequence=300, cache=tmp_path / "cache")
    ids, labels = rows_of(made)
    assert tokenizer.decode(ids[0]).startswith(3 * tokenizer.apply_chat_template(TWO_TURNS, tokenize=False))
    assert learnt(tokenizer, labels[0]) == 3 * ["First.<|end|>", "Second.<|end|>"]


def test_another_name_of_the_field(tmp_path: Path) -> None:
    runs, _ = prepared(tmp_path, byte_tokenizer(CHAT), {"talk": TWO_TURNS, "text": "no"}, text_field="talk")
    assert runs == ["First.<|end|>", "Second.<|end|>"]
    runs, _ = prepared(tmp_path, byte_tokenizer(), {"body": "words", "text": "no"}, text_field="body")
    assert runs == ["words<|end|>"]


def test_tools_reach_the_template(tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools[0].name }}\n{% endif %}" + CHAT
    _, texts = prepared(tmp_path, byte_tokenizer(template), {"messages": TWO_TURNS, "tools": [{"name": "search"}]})
    assert texts[0].startswith("search\n<|im|>user")


def test_a_turn_that_cannot_be_found_is_refused(tmp_path: Path) -> None:
    """A template that scrambles: guessing would teach the model its user's words."""
    template = "{% for message in messages %}{{ message.content }}{{ messages | length }}{{ loop.index }}{% endfor %}x"
    scrambled = template.replace("{{ message.content }}", "{{ message.content | length }}")
    with pytest.raises(Exception, match=r"a\.jsonl, line 1: turn 2 cannot be found") as caught:
        prepared(tmp_path, byte_tokenizer(scrambled), {"messages": TWO_TURNS})
    assert "\n" not in str(caught.value)


def test_text_has_no_completions(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="completions-only"):
        prepared(tmp_path, byte_tokenizer(), {"text": "abc"}, completions_only=True)
