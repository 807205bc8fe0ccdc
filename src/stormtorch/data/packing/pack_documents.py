"""Packs documents as tokens: tokenises a batch at a time, in constant memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...core.errors import SettingError
from ..formats.dtypes import INTEGERS, name_of
from ..source import Field
from .documents import Content, Document, DocumentReader
from .text_tokenizer import TextTokenizer
from .writer import PackWriter

_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 1024, 1 << 20


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """How documents become tokens. ``end``: the token after each document; ``dtype``: None for the smallest that fits.

    That is uint16 for vocabularies up to 65,536, else int32: as small as uint32, and embeddings accept it.
    """

    tokenizer: TextTokenizer | None
    end: int | None
    dtype: torch.dtype | None
    mask: bool = False  # write loss_mask: 0 for the tokens of prompts, 1 for all others
    numbers: bool = False  # write documents: the number of the token's document in the input

    def chosen_dtype(self) -> torch.dtype:
        if self.dtype is not None:
            if name_of(self.dtype) not in INTEGERS:
                raise SettingError(
                    f"--dtype {name_of(self.dtype)} is not a dtype of tokens. Accepted: {', '.join(sorted(INTEGERS))}."
                )
            return self.dtype
        if self.tokenizer is None:
            raise SettingError(
                "Without a tokenizer the range of tokens is unknown. Give --dtype, e.g. uint16 or int32."
            )
        return torch.uint16 if max(self.tokenizer.largest, self.end or 0) < 1 << 16 else torch.int32


def pack_documents(
    paths: Sequence[Path], out: Path, *, reader: DocumentReader, options: TokenOptions, shard_bytes: int
) -> tuple[int, int]:
    """Tokenise all documents of ``paths`` into ``out``; returns the numbers of documents and tokens. Blocks."""
    dtype = options.chosen_dtype()
    fields = [Field(name="tokens", dtype=dtype, shape=())]
    fields += [Field(name="loss_mask", dtype=torch.uint8, shape=())] if options.mask else []
    fields += [Field(name="documents", dtype=torch.int32, shape=())] if options.numbers else []
    made_with: dict[str, object] = {"end_of_document": options.end}
    if options.tokenizer is not None:
        made_with |= {"tokenizer": options.tokenizer.path.name, "largest_token": options.tokenizer.largest}
    count = 0
    with PackWriter(out, kind="tokens", fields=fields, shard_bytes=shard_bytes, made_with=made_with) as writer:
        for batch in _batched(document for path in paths for document in reader.read(path)):
            writer.write(_columns(batch, options, dtype, count))
            count += len(batch)
    return count, writer.rows


def _batched(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.content) + len(document.prompt or ())
        if len(batch) == _BATCH_DOCUMENTS or size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _columns(batch: list[Document], options: TokenOptions, dtype: torch.dtype, first: int) -> Mapping[str, Tensor]:
    """Tokens, mask and numbers of some documents; the first has the number ``first``."""
    prompts = _encode([document.prompt or [] for document in batch], options.tokenizer)
    contents = _encode([document.content for document in batch], options.tokenizer)
    end = [] if options.end is None else [options.end]
    parts = [part for both in zip(prompts, contents, strict=True) for part in (*both, end)]
    try:
        flat = np.fromiter(itertools.chain.from_iterable(parts), dtype=np.int64)
    except OverflowError as error:
        raise SettingError(
            "A token does not fit in 64 bits. Tokens are indices into a vocabulary; correct the input."
        ) from error
    limits = torch.iinfo(dtype)
    if len(flat) and not limits.min <= int(flat.min()) <= int(flat.max()) <= limits.max:
        raise SettingError(
            f"Token {flat.max() if flat.max() > limits.max else flat.min()} does not fit in {name_of(dtype)}. "
            "Give a wider --dtype, such as int32."
        )
    columns = {"tokens": torch.from_numpy(flat).to(dtype)}
    before = np.array([len(prompt) for prompt in prompts])
    behind = np.array([len(content) + len(end) for content in contents])
    if options.mask:
        ones = np.tile(np.array([0, 1], dtype=np.uint8), len(batch))
        columns["loss_mask"] = torch.from_numpy(np.repeat(ones, np.stack([before, behind], axis=1).ravel()))
    if options.numbers:
        numbers = np.arange(first, first + len(batch), dtype=np.int64).astype(np.int32)
        columns["documents"] = torch.from_numpy(np.repeat(numbers, before + behind))
    return columns


def _encode(contents: Sequence[Content], tokenizer: TextTokenizer | None) -> list[Sequence[int]]:
    texts = [content for content in contents if isinstance(content, str)]
    if texts and tokenizer is None:
        raise SettingError("The documents are text, not tokens. Name a tokenizer: --tokenizer PATH.")
    encoded = iter(tokenizer.encode(texts) if texts and tokenizer is not None else [])
    return [next(encoded) if isinstance(content, str) else content for content in contents]
