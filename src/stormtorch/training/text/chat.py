"""Conversations to text, by the tokenizer's own chat template, and exactly where the assistant speaks in it.

A template may mark the assistant's words itself (``{% generation %}``); then its marks are taken. Most do not. For
those a turn's words begin where the generation prompt ends (the conversation before it, rendered as it will be when
the model is asked to answer) and end where the rendering of the conversation up to and including the turn ends.
Some templates render a turn differently once others follow it (they drop its thoughts, say): there the turn is found
by rendering the whole conversation a second time with another text in its place, since what lies before and behind it
stays the same. What cannot be found is refused: a guess would train the model on its user's words, silently.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...core.errors import SettingError, StorageError
from ..errors import reason

_STAND_IN = "\u2043stand-in for the words of turn\u2043"  # not a text that a template would change, or a user write
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")

Messages = list[dict[str, Any]]


class ChatTemplate:
    """Renders conversations with the template of ``tokenizer``, a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise SettingError(
                "The data holds conversations, and the tokenizer has no chat template. Use the tokenizer of a chat "
                "model (--tokenizer PATH), or put a chat_template.jinja into the tokenizer's directory."
            )
        self._tokenizer = tokenizer
        self._marked = isinstance(template, str) and _MARKS.search(template) is not None

    def render(
        self, place: str, messages: object, *, tools: Any = None, spans: bool = True
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and with ``spans`` the characters of it that the assistant says."""
        checked = _checked(place, messages)
        if spans and not any(message["role"] == "assistant" for message in checked):
            raise StorageError(
                f"{place}: the conversation has no turn of the assistant, so nothing of it is to be learnt. "
                "Remove the line, or learn everything: --no-completions-only."
            )
        try:
            text = self._render(checked, tools)
            if not spans:
                return text, []
            if self._marked:
                return text, self._marked_spans(place, checked, tools)
            found = [
                self._span(place, text, checked, turn, tools)
                for turn, message in enumerate(checked)
                if message["role"] == "assistant"
            ]
        except (SettingError, StorageError):
            raise
        except Exception as error:  # a template raises what it likes: jinja's errors, TypeError, KeyError
            raise StorageError(
                f"{place}: the chat template refuses the conversation ({reason(error)}). Correct it."
            ) from error
        return text, found

    def _render(self, messages: Messages, tools: Any, *, answer: bool = False) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=answer
        )
        return text

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
            raise StorageError(f"{place}: the chat template marks nothing in it as the assistant's. Remove the line.")
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
                f"{place}: turn {turn + 1} cannot be found in what the chat template makes of the conversation. Mark "
                "the assistant's words in it ({% generation %}), or learn everything: --no-completions-only."
            )
        # Line ends behind the end-of-turn token: the template puts them there, the model is never asked for them.
        return start, start + len(text[start:end].rstrip())

    def _around(self, text: str, messages: Messages, turn: int, tools: Any) -> tuple[int | None, int | None]:
        """Where turn's words begin and its end-of-turn ends, found by putting other words in their place."""
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
        marker = 0  # the length of what ends the turn, before the next one begins
        while alone[marker : marker + 1] == behind[marker : marker + 1] != "":
            marker += 1
        return start, len(text) - len(behind) + marker


def _checked(place: str, messages: object) -> Messages:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise StorageError(
            f"{place}: 'messages' is no list of messages. Accepted: [{{'role': ..., 'content': ...}}, ...]."
        )
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise StorageError(f"{place}: message {number} is no object with a 'role'. Correct it.")
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise StorageError(
                f"{place}: the 'content' of message {number} is {type(content).__name__} and no text. Correct it."
            )
    return list(messages)
