"""``storm data``: packs text or arrays into shards that load fast, and verifies such shards."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import SettingError
from ..core.sizes import format_bytes, parse_bytes
from .live import Progress

if TYPE_CHECKING:
    import torch

    from ..data.packing.text_tokenizer import TextTokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    text = "Pack documents (text or JSON lines, Arrow, Parquet) as tokens, or arrays as rows, into a new directory."
    pack = actions.add_parser("pack", help="pack text or arrays into a new directory", description=text)
    pack.add_argument("input", nargs="+", type=Path, help="files, or directories of files")
    pack.add_argument("--out", type=Path, required=True, help="the directory to make; it must not exist")
    pack.add_argument("--tokenizer", type=Path, help="for documents: a tokenizer.json, or a tokenizer's directory")
    pack.add_argument("--text-field", help="key or column with the text or its tokens (default: text)")
    pack.add_argument("--prompt-field", help="key or column with the prompt before the text; adds a loss mask")
    pack.add_argument("--eos-id", help="number of the token after each document, or none (default: the tokenizer's)")
    pack.add_argument("--document-numbers", action="store_true", help="write the number of each token's document too")
    pack.add_argument("--skip-bad-lines", action="store_true", help="skip unreadable lines, and count them")
    pack.add_argument("--columns", nargs="+", help="fields of the arrays to pack (default: all)")
    pack.add_argument("--dtype", help="of the tokens (default: the smallest that fits them), or of the arrays' floats")
    pack.add_argument("--shard-size", default="512MiB", metavar="SIZE", help="limit of a shard (default: 512MiB)")
    verify = actions.add_parser("verify", help="compare packed shards with their checksums")
    verify.add_argument("directory", type=Path, help="a directory that storm data pack made")
    for action in (pack, verify):
        action.set_defaults(parser=action)


def run(options: argparse.Namespace) -> int:
    return _verify(options.directory) if options.action == "verify" else _pack(options)


def _verify(directory: Path) -> int:
    from ..data.formats.plain.packed import read_index, verify

    index = read_index(directory)
    total = sum(file.bytes for shard in index.shards for file in shard.files)
    progress = Progress(total)
    verify(directory, progress)
    progress.close()
    print(f"{directory}: {len(index.shards)} shards, {format_bytes(total)}, every checksum is right.")
    return 0


def _pack(options: argparse.Namespace) -> int:
    from ..data.formats.dtypes import parse_dtype

    shard_bytes = parse_bytes(options.shard_size, setting="--shard-size")
    if shard_bytes == 0:
        raise SettingError("--shard-size 0 holds no row. Accepted: a byte size of at least 1, such as 512MiB.")
    dtype = None if options.dtype is None else parse_dtype(options.dtype, setting="--dtype")
    of_documents = options.tokenizer is not None or options.text_field is not None
    (_pack_documents if of_documents else _pack_rows)(options, shard_bytes, dtype)
    return 0


def _pack_documents(options: argparse.Namespace, shard_bytes: int, dtype: torch.dtype | None) -> None:
    from ..data.formats.paths import file_size
    from ..data.packing.documents import DocumentReader, document_files
    from ..data.packing.pack_documents import TokenOptions, pack_documents
    from ..data.packing.text_tokenizer import TextTokenizer

    _refuse(options, "documents", "columns")
    tokenizer = None if options.tokenizer is None else TextTokenizer(options.tokenizer)
    paths = [file for path in options.input for file in document_files(path)]
    progress = Progress(sum(file_size(path) for path in paths))
    reader = DocumentReader(
        text_field=options.text_field or "text",
        prompt_field=options.prompt_field,
        skip_bad_lines=options.skip_bad_lines,
        progress=progress,
    )
    tokens = TokenOptions(
        tokenizer=tokenizer,
        end=_end_token(options.eos_id, tokenizer),
        dtype=dtype,
        mask=options.prompt_field is not None,
        numbers=options.document_numbers,
    )
    documents, count = pack_documents(paths, options.out, reader=reader, options=tokens, shard_bytes=shard_bytes)
    progress.close()
    skipped = f", {reader.bad_lines} bad lines skipped" if reader.bad_lines else ""
    print(f"{options.out}: {documents} documents, {count} tokens{skipped}.")
    print(f"Train on it: storm train --model MODEL --data {options.out}")
    print(f"Read it with storm.DataLoader(storm.data.tokens({str(options.out)!r}, sequence=2048), ...).")


def _pack_rows(options: argparse.Namespace, shard_bytes: int, dtype: torch.dtype | None) -> None:
    from ..data.packing.documents import TEXTS
    from ..data.packing.pack_rows import pack_rows, rows_to_pack

    _refuse(options, "arrays", "prompt_field", "eos_id", "document_numbers", "skip_bad_lines")
    for path in options.input:
        if path.suffix.lower() in TEXTS:
            raise SettingError(f"{path} is text. Name a tokenizer: --tokenizer PATH.")
    fields, chunks, total = rows_to_pack(options.input, options.columns)
    progress = Progress(total)
    rows = pack_rows(fields, chunks, options.out, shard_bytes=shard_bytes, dtype=dtype, progress=progress)
    progress.close()
    print(f"{options.out}: {rows} rows.")
    print(f"Read it with storm.DataLoader({str(options.out)!r}, ...).")


def _end_token(given: str | None, tokenizer: TextTokenizer | None) -> int | None:
    if given == "none" or (given is None and tokenizer is None):
        return None  # without a tokenizer: the tool that tokenised the documents has added separators
    if given is None:
        assert tokenizer is not None
        if tokenizer.end is None:
            raise SettingError(
                f"--tokenizer {tokenizer.path} does not say which token ends a document. Give it: --eos-id N, or none."
            )
        return tokenizer.end
    if not given.isascii() or not given.isdecimal():
        raise SettingError(f"--eos-id {given} is not valid. Accepted: a number of at least 0, or none.")
    return int(given)


def _refuse(options: argparse.Namespace, kind: str, *names: str) -> None:
    """Refuse flags that have no effect for this kind of input."""
    for name in names:
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise SettingError(f"{flag} has no effect for {kind}. Remove it; documents need --tokenizer.")
