"""Renders conversations with the tokenizer's chat template, and finds the assistant's words in the text.

If a template marks the assistant's words itself (``{% generation %}``), its marks are used. Most do not. Then a turn's
words begin where the generation prompt ends (the conversation before the turn, rendered as at inference) and end where
the rendering of the conversation up to and including the turn ends. Some templates render a turn differently once
others follow it, e.g. without its thoughts. Then a second rendering of the whole conversation, with another text in
the turn's place, finds the turn: the text before and after it is the same. A turn that cannot be found is an error: a
guess would silently train the model on its user's words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...core.errors import SettingError, StorageError
from ..errors import reason

_STAND_IN = "\u2043stand-in for the words of turn\u2043"  # a text that no template changes and no user writes
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")

Messages = list[dict[str, Any]]


class ChatTemplate:
    """Renders conversations with the template of ``tokenizer``, a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise SettingError(
                "The data holds conversations, but the tokenizer has no chat template. Use the tokenizer of a chat "
                "model (--tokenizer PATH), or put a chat_template.jinja into the tokenizer's directory."
            )
        self._tokenizer = tokenizer
        self._marked = isinstance(template, str) and _MARKS.search(template) is not None

    def render(
        self, place: str, messages: object, *, tools: Any, spans: bool
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """The text of a conversation, and with ``spans`` the spans of the assistant's words."""
        checked = _checked(place, messages)
        if spans and not any(message["role"] == "assistant" for message in checked):
            raise StorageError(
                f"{place}: the conversation has no turn of the assistant to train on. "
                "Remove the line, or train on everything: --no-completions-only."
            )
        try:
            text = self._render(checked, tools)
            if not spans:
                return text, None
            if self._marked:
                return text, self._marked_spans(place, checked, tools)
            found = [
                self._span(place, text, checked, turn, tools)
                for turn, message in enumerate(checked)
                if message["role"] == "assistant"
            ]
        except (SettingError, StorageError):
            raise
        except Exception as error:  # a template may raise anything: jinja's errors, TypeError, KeyError
            raise StorageError(
                f"{place}: the chat template refuses the conversation ({reason(error)}). Correct it."
            ) from error
        return text, found

    def _render(self, messages: Messages, tools: Any, *, answer: bool = False) -> str:
        render = self._tokenizer.apply_chat_template
        return str(render(messages, tools=tools, tokenize=False, add_generation_prompt=answer))

    def _marked_spans(self, place: str, messages: Messages, tools: Any) -> list[tuple[int, int]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self._tokenizer.get_chat_template(None, tools),
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        spans = [(int(start), int(end)) for start, end in rendered[1][0] if end > start]
        if not spans:
            raise StorageError(f"{place}: the chat template marks no words of the assistant. Remove the line.")
        return spans

    def _span(self, place: str, text: str, messages: Messages, turn: int, tools: Any) -> tuple[int, int]:
        start = end = None
        if turn:
            before = self._render(messages[:turn], tools, answer=True)
            start = len(before) if text.startswith(before) else None
        through = text if turn + 1 == len(messages) else self._render(messages[: turn + 1], tools)
        if text.startswith(through):
            end = len(through)
        if start is None or end is None:
            first, last = self._around(text, messages, turn, tools)
            start, end = first if start is None else start, last if end is None else end
        if start is None or end is None or end <= start:
            raise StorageError(
                f"{place}: turn {turn + 1} cannot be found in the text that the chat template renders. Mark the "
                "assistant's words in it ({% generation %}), or train on everything: --no-completions-only."
            )
        # Drop line ends after the end-of-turn token: the template adds them, the model never generates them.
        return start, start + len(text[start:end].rstrip())

    def _around(self, text: str, messages: Messages, turn: int, tools: Any) -> tuple[int | None, int | None]:
        """The beginning of the turn's words and the end of its end-of-turn token, found by replacing the words."""
        replaced = {**messages[turn], "content": _STAND_IN}
        before, found, behind = self._render([*messages[:turn], replaced, *messages[turn + 1 :]], tools).partition(
            _STAND_IN
        )
        if not found:
            return None, None
        start = len(before) if text.startswith(before) else None
        if not text.endswith(behind):
            return start, None
        _, _, alone = self._render([*messages[:turn], replaced], tools).partition(_STAND_IN)
        marker = 0  # the length of the end-of-turn token
        while alone[marker : marker + 1] == behind[marker : marker + 1] != "":
            marker += 1
        return start, len(text) - len(behind) + marker


def _checked(place: str, messages: object) -> Messages:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise StorageError(
            f"{place}: 'messages' is not a list of messages. Accepted: [{{'role': ..., 'content': ...}}, ...]."
        )
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise StorageError(f"{place}: message {number} is not an object with a 'role'. Correct it.")
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise StorageError(
                f"{place}: the 'content' of message {number} is {type(content).__name__}, not text. Correct it."
            )
    return list(messages)
