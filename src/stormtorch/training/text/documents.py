"""Turns records into documents: a text, and the parts of it to train on.

The first record tells the format: ``{"text": ...}``, ``{"prompt": ..., "completion": ...}`` or ``{"messages": [...]}``.
A text may also be a list of token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...core.errors import SettingError, StorageError
from .chat import ChatTemplate
from .records import Record

Span = tuple[int, int]


@dataclass(frozen=True)
class Document:
    """``learn``: the spans to train on, in characters, or in tokens if ``content`` is tokens; None: everything.

    ``opening``: add the special tokens that the tokenizer puts around a text. ``ending``: add the end token. ``last``:
    no other piece of the same document follows.
    """

    place: str
    content: str | Sequence[int]
    learn: Sequence[Span] | None
    opening: bool = True
    ending: bool = True
    last: bool = True


@dataclass(frozen=True)
class Reading:
    """How to read records: the format, and the field of the text."""

    format: Literal["text", "chat", "completion"]
    completions_only: bool
    text_field: str
    template: ChatTemplate | None = None  # for chats

    def document(self, record: Record) -> Document:
        """Raises StorageError, with the place of the record, if it does not have the format."""
        if isinstance(record.content, str):
            if self.format != "text":
                raise StorageError(
                    f"{record.place}: plain text, but the data has format {self.format!r}. Give JSON lines, "
                    "or train on text alone: --format text."
                )
            return Document(record.place, record.content, None, record.first, ending=record.last, last=record.last)
        if self.format == "text":
            return Document(record.place, _content(record, record.content, self.text_field), None)
        if self.format == "completion":
            return self._completion(record, record.content)
        return self._chat(record, record.content)

    def _completion(self, record: Record, found: dict[str, Any]) -> Document:
        prompt = _content(record, found, "prompt", empty=True)
        completion = _content(record, found, "completion")
        if type(prompt) is not type(completion):
            raise StorageError(f"{record.place}: one of 'prompt' and 'completion' is text, the other tokens.")
        both = prompt + completion
        learn = ((len(prompt), len(both)),) if self.completions_only else None
        return Document(record.place, both, learn)

    def _chat(self, record: Record, found: dict[str, Any]) -> Document:
        if self.text_field not in found:
            raise _missing(record, found, self.text_field)
        assert self.template is not None
        text, spans = self.template.render(
            record.place, found[self.text_field], tools=found.get("tools"), spans=self.completions_only
        )
        # The template begins and ends a conversation. Other special tokens would not be there at inference.
        return Document(record.place, text, spans, opening=False, ending=False)


def settle(
    first: Record, format: str, completions_only: bool | None, text_field: str | None, tokenizer: Any
) -> Reading:
    """How to read data that begins with ``first``. Raises SettingError if the settings contradict it."""
    kind = _detected(first, text_field) if format == "auto" else format
    if kind == "text" and completions_only:
        raise SettingError(
            "--completions-only does not apply to text, which has no prompts. Leave it out, or give records with "
            "'prompt' and 'completion', or 'messages'."
        )
    only = kind != "text" if completions_only is None else completions_only
    if kind == "chat":
        template = ChatTemplate(tokenizer)
        return Reading("chat", only, text_field or "messages", template)
    if kind == "completion":
        return Reading("completion", only, "")
    return Reading("text", only, text_field or "text")


def _detected(first: Record, text_field: str | None) -> str:
    found = first.content
    if isinstance(found, str):
        return "text"
    if text_field is not None and text_field in found:
        value = found[text_field]
        return "chat" if isinstance(value, list) and any(isinstance(item, dict) for item in value) else "text"
    if text_field is None:
        if "messages" in found:
            return "chat"
        if "prompt" in found and "completion" in found:
            return "completion"
        if "text" in found:
            return "text"
    raise _missing(first, found, text_field or "text")


def _content(record: Record, found: dict[str, Any], name: str, *, empty: bool = False) -> Any:
    """A text, or a list of token ids."""
    value = found.get(name)
    if isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value)):
        if not value and not empty:
            raise StorageError(f"{record.place}: field {name!r} is empty. Fill it, or remove the line.")
        return value
    if name not in found:
        raise _missing(record, found, name)
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        raise StorageError(
            f"{record.place}: field {name!r} is a list of messages, not text. Put all turns of the conversation "
            'into one list: {"messages": [...]}.'
        )
    raise StorageError(
        f"{record.place}: field {name!r} is of type {type(value).__name__}, neither text nor a list of token ids. "
        "Correct it."
    )


def _missing(record: Record, found: dict[str, Any], name: str) -> StorageError:
    there = ", ".join(map(repr, list(found)[:8])) or "nothing"
    return StorageError(
        f"{record.place}: no field {name!r}, there is {there}. Accepted: 'text', 'prompt' with 'completion', or "
        f"'messages'. Give another name of the text's field with --text-field.{_conversion(found)}"
    )


def _conversion(found: dict[str, Any]) -> str:
    """A command that converts rows of other well-known forms."""
    if {"instruction", "output"} <= found.keys():  # Alpaca's
        text = '.instruction + (if (.input // "") == "" then "" else "\\n\\n" + .input end) + "\\n\\n"'
        return f" Convert it: jq -c '{{prompt: ({text}), completion: .output}}' FILE > data.jsonl."
    if "conversations" in found:  # ShareGPT's
        role = '({human: "user", gpt: "assistant"}[.from] // .from)'
        return (
            f" Convert it: jq -c '{{messages: [.conversations[] | {{role: {role}, content: .value}}]}}' FILE "
            "> data.jsonl."
        )
    return ""
