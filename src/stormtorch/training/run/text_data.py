"""The data of a run: its tokenizer, text tokenised once, and loaders of the rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...core.errors import SettingError, StormError
from ...data.delivery.transforms import Cast
from ...data.loader import DataLoader
from ...data.packing.text_tokenizer import TextTokenizer
from ..errors import reason, require
from ..model import hf_model
from ..model.model_folder import check_model_folder
from ..reporting import Watcher
from ..settings.train_settings import TrainSettings, is_callable_name
from ..text import Prepared, input_bytes, prepare
from ..text.encode import beyond_vocabulary


class TextData(NamedTuple):
    """The rows for training and, optionally, for evaluation. ``total``: the number of optimizer steps."""

    tokenizer: Any
    rows: Prepared
    eval_rows: Prepared | None
    total: int


def read_text(settings: TrainSettings, cache: Path, watcher: Watcher) -> TextData:
    """Prepare the rows, or find them in ``cache``; describes them to the user."""
    vocabulary = None
    if not is_callable_name(settings.model):
        config = hf_model.read_config(Path(str(settings.model)))
        vocabulary = getattr(config.get_text_config(), "vocab_size", None)
        longer = hf_model.check_positions(config, settings.sequence)
        if longer is not None:
            watcher.warn(longer)
    tokenizer = load_tokenizer(settings)

    def prepared(paths: tuple[str, ...]) -> Prepared:
        return prepare(
            paths,
            tokenizer,
            sequence=settings.sequence,
            cache=cache,
            packing=settings.packing,
            format=settings.format,
            completions_only=settings.completions_only,
            text_field=settings.text_field,
            vocabulary=vocabulary,
            warn=watcher.warn,
            progress=watcher.reading(input_bytes(paths)),
        )

    for prompt in settings.sample_prompts or ():
        largest = max(tokenizer.encode(prompt), default=0)
        if vocabulary is not None and largest >= vocabulary:  # it would end the run at the first sample
            raise beyond_vocabulary(f"--sample-prompts {prompt!r}", largest, vocabulary, tokenizer)
    rows = prepared(settings.data)
    watcher.say(f"data       {rows}")
    eval_rows = None
    if settings.eval_data is not None:
        eval_rows = prepared(settings.eval_data)
        watcher.say(f"evaluation {eval_rows}")
    return TextData(tokenizer, rows, eval_rows, total_steps(settings, rows.rows))


def total_steps(settings: TrainSettings, rows: int) -> int:
    """Optimizer steps of the whole run."""
    batches = rows // settings.batch
    if batches == 0:
        raise SettingError(
            f"The data has {rows} rows of {settings.sequence} tokens, fewer than batch={settings.batch}. "
            "Lower --batch or --sequence."
        )
    if settings.steps is not None:
        return settings.steps
    steps = int(settings.epochs * batches / settings.accumulate + 1e-9)  # 0.57 * 100 is 56.99999999999999
    if steps == 0:
        raise SettingError(
            f"epochs={settings.epochs:g} of {batches} batches are fewer than one step of "
            f"accumulate={settings.accumulate}. Raise --epochs, or lower --accumulate."
        )
    return steps


def loader_of(rows: Prepared, settings: TrainSettings, device: torch.device, *, steps: int | None = None) -> DataLoader:
    """A loader of the rows in order, once; with ``steps``, shuffled and as often as these need. A shuffled pass leaves
    out rows that do not fill a batch."""
    shuffle = steps is not None
    return DataLoader(
        rows.arrays,
        settings.batch,
        shuffle=shuffle,
        seed=settings.seed,
        device=device,
        drop_last=shuffle,
        epochs=1 if steps is None else math.ceil(steps * settings.accumulate / (rows.rows // settings.batch)),
        transform=dict.fromkeys(rows.arrays, Cast(torch.int64)),
    )


def load_tokenizer(settings: TrainSettings) -> Any:
    """A tokenizer of transformers, from a directory or a ``tokenizer.json``."""
    given = settings.tokenizer if settings.tokenizer is not None else settings.model
    assert given is not None
    path = Path(given)
    transformers = require("transformers", extra="hf", why="Reading text")
    if settings.tokenizer is None and not _may_hold_tokenizer(path):
        raise SettingError(
            f"--model {given} has no tokenizer. Give --tokenizer PATH, a tokenizer's directory or a tokenizer.json."
        )
    if not path.exists():
        raise SettingError(f"--tokenizer {given} does not exist. Name a tokenizer's directory, or a tokenizer.json.")
    try:
        if path.is_file() and not (path.parent / "tokenizer_config.json").is_file():
            return _bare(transformers, path)
        folder = path.parent if path.is_file() else path
        check_model_folder(folder)
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except StormError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for a file that it cannot read
        raise SettingError(f"No tokenizer can be read from {path}: {reason(error)}. Give --tokenizer PATH.") from error


def _may_hold_tokenizer(folder: Path) -> bool:
    """Whether it has a file of any kind of tokenizer. Without one, transformers' error is a list of guesses."""
    kinds = ("*token*", "vocab*", "merges.txt", "*.model", "*.spm", "*.bpe", "*.tiktoken")
    return any(any(folder.glob(kind)) for kind in kinds)


def _bare(transformers: Any, file: Path) -> Any:
    """A ``tokenizer.json`` without a configuration: finds the end token by its usual names."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    end = TextTokenizer(file).end
    if end is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    return tokenizer
