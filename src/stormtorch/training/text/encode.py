"""Turns files into tokens and labels, with a tokenizer of transformers.

`Texts` tokenises prompt and answer as one text, and uses each token's character offsets: tokenised separately, many
tokenizers would put a space before the answer, or miss the token that spans the border. A token is trained if any of
its characters is.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.errors import SettingError, StorageError
from ...data.formats.text_lines import Progress
from ..errors import reason
from .documents import Document, Reading, Span, records
from .rows import IGNORED, Ids, digest_of

_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 256, 1 << 20


class Texts:
    """Files of text or JSON lines, as tokens and labels. ``tokenizer`` may be None if all documents are tokens."""

    def __init__(
        self, files: Sequence[Path], reading: Reading, tokenizer: Any, vocabulary: int | None, cache: Path
    ) -> None:
        self._files, self._reading, self._tokenizer = files, reading, tokenizer
        self._vocabulary, self._cache = vocabulary, cache
        self._offsets = bool(getattr(tokenizer, "is_fast", False))
        self.place, self.format, self.padding = str(files[0]), reading.format, padding_token(tokenizer)
        self.largest = -1  # of the tokens seen

    def made_from(self) -> dict[str, Any]:
        """Everything that decides the rows, besides their length."""
        return {
            "files": digest_of(self._files, self._cache),
            "tokenizer": self._identity(),
            "format": self._reading.format,
            "completions_only": self._reading.completions_only,
            "text_field": self._reading.text_field,
        }

    def encoded(self, progress: Progress | None) -> Iterator[tuple[Ids, Ids, bool]]:
        """Tokens and labels, in order, and whether they end a document. Tokenises a batch at a time, on all cores."""
        documents = (self._reading.document(record) for file in self._files for record in records(file, progress))
        for (is_text, opening), group in itertools.groupby(documents, _kind):
            for batch in _batched(group):
                made = self._texts(batch, opening=opening) if is_text else map(_given, batch)
                for document, (ids, learn) in zip(batch, list(made), strict=True):  # arrays are smaller than lists
                    self._check(document, ids)
                    yield ids, np.where(learn, ids, np.int32(IGNORED)), document.last

    def beyond_vocabulary(self, token: int, place: str | None = None) -> SettingError:
        assert self._vocabulary is not None
        return beyond_vocabulary(place or self.place, token, self._vocabulary, self._tokenizer)

    def _identity(self) -> str:
        """A hash of everything that decides the tokens of a text."""
        if self._tokenizer is None:
            return "none"
        if self._offsets:
            made = json.loads(self._tokenizer.backend_tokenizer.to_str())
            made |= {"truncation": None, "padding": None}  # each call sets them
        else:
            made = {"class": type(self._tokenizer).__name__, "vocabulary": self._tokenizer.get_vocab()}
        made["ends"] = [self._tokenizer.eos_token_id, self.padding]
        made["template"] = getattr(self._tokenizer, "chat_template", None)
        return hashlib.blake2b(json.dumps(made, sort_keys=True).encode(), digest_size=16).hexdigest()

    def _texts(self, documents: Sequence[Document], *, opening: bool) -> Iterator[tuple[Ids, npt.NDArray[np.bool_]]]:
        if self._tokenizer is None:
            raise SettingError(f"{documents[0].place}: text needs a tokenizer. Name one: --tokenizer PATH.")
        masked = any(document.learn is not None for document in documents)
        if masked and not self._offsets:
            raise SettingError(
                f"{documents[0].place}: training on answers alone needs to know which characters each token stands "
                f"for, and {type(self._tokenizer).__name__} does not say. Use a tokenizer with a tokenizer.json, or "
                "train on everything: --no-completions-only."
            )
        try:
            made = self._tokenizer(
                [str(document.content) for document in documents],
                add_special_tokens=opening,
                return_attention_mask=False,
                truncation=False,
                verbose=False,
                return_offsets_mapping=masked,
            )
        except Exception as error:  # tokenizers raises TypeError, or bare Exception
            raise self._refusal(documents, error) from error
        for at, document in enumerate(documents):
            ids = made["input_ids"][at]
            if document.learn is None:
                learn = np.ones(len(ids), dtype=np.bool_)
            else:
                learn = _within(np.array(made["offset_mapping"][at], dtype=np.int64).reshape(-1, 2), document.learn)
            if not document.last and opening and ids and ids[-1] == self._tokenizer.eos_token_id:
                ids, learn = ids[:-1], learn[:-1]  # some tokenizers end every text, but this document goes on
            if document.ending and (not ids or ids[-1] != self._end()):
                ids, learn = [*ids, self._end()], np.append(learn, True)
            elif document.ending:
                learn[-1] = True  # the tokenizer has added the end token itself
            yield np.array(ids, dtype=np.int32), learn

    def _refusal(self, documents: Sequence[Document], error: Exception) -> StorageError:
        """The error for a document that the tokenizer refuses: the first with invalid Unicode, if there is one."""
        for document in documents:
            try:
                str(document.content).encode()
            except UnicodeEncodeError as half:
                found = str(document.content)[half.start]
                return StorageError(
                    f"{document.place}: character {half.start + 1} is {found!r}, a lone surrogate. Remove it."
                )
        return StorageError(f"{documents[0].place}: the tokenizer refuses it or a later document: {reason(error)}.")

    def _end(self) -> int:
        end = self._tokenizer.eos_token_id
        if end is None:
            raise SettingError(
                "The tokenizer names no token that ends a document. Set eos_token in its tokenizer_config.json."
            )
        return int(end)

    def _check(self, document: Document, ids: Ids) -> None:
        largest = int(ids.max(initial=-1))
        self.largest = max(self.largest, largest)
        if self._vocabulary is not None and largest >= self._vocabulary:
            raise self.beyond_vocabulary(largest, document.place)
        if ids.min(initial=0) < 0:
            raise StorageError(f"{document.place}: token {int(ids.min())} is below 0. Correct it.")


def padding_token(tokenizer: Any) -> int:
    """The token that fills a row after a document; it is not trained, and causal attention never sees it."""
    ids = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    return next((found for found in ids if isinstance(found, int)), 0)


def beyond_vocabulary(place: str, token: int, vocabulary: int, tokenizer: Any) -> SettingError:
    size = "" if tokenizer is None else f", the tokenizer has {len(tokenizer)}"
    return SettingError(
        f"{place}: token {token} is beyond the model's vocabulary of {vocabulary}{size}. Use the tokenizer that the "
        "model was made with: --tokenizer PATH."
    )


def _given(document: Document) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Tokens from the user, unchanged, without special tokens."""
    try:
        ids = np.array(document.content, dtype=np.int32)
    except OverflowError as error:
        raise StorageError(f"{document.place}: a token does not fit in 32 bits. Correct it.") from error
    learn = np.full(len(ids), document.learn is None)
    for start, end in document.learn or ():
        learn[start:end] = True
    return ids, learn


def _kind(document: Document) -> tuple[bool, bool]:
    return isinstance(document.content, str), document.opening


def _within(offsets: npt.NDArray[np.int64], spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    starts, ends = offsets[:, 0], offsets[:, 1]
    learn = np.zeros(len(offsets), dtype=np.bool_)
    for start, end in spans:
        learn |= (ends > start) & (starts < end) & (ends > starts)
    return learn


def _batched(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.content)
        if len(batch) == _BATCH_DOCUMENTS or size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
