"""The data of a run: text tokenised once, and loaders of the rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...core.errors import SettingError
from ...data.delivery.transforms import Cast
from ...data.loader import DataLoader
from ..model import hf_model
from ..model.tokenizer import load_tokenizer
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

    _check_prompts(settings, tokenizer, vocabulary)
    rows = prepared(settings.data)
    watcher.say(f"data       {rows}")
    eval_rows = None
    if settings.eval_data is not None:
        eval_rows = prepared(settings.eval_data)
        watcher.say(f"evaluation {eval_rows}")
    return TextData(tokenizer, rows, eval_rows, total_steps(settings, rows.rows))


def _check_prompts(settings: TrainSettings, tokenizer: Any, vocabulary: int | None) -> None:
    """Refuse prompts with tokens beyond the vocabulary, which would end the run at the first sample."""
    for prompt in settings.sample_prompts or ():
        largest = max(tokenizer.encode(prompt), default=0)
        if vocabulary is not None and largest >= vocabulary:
            raise beyond_vocabulary(f"--sample-prompts {prompt!r}", largest, vocabulary, tokenizer)


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
