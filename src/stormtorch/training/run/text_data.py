"""The data of a run: text tokenised once, and loaders of the rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...core.errors import SettingError
from ...data.delivery.transforms import Cast
from ...data.loader import DataLoader
from ..model import hf_model
from ..model.tokenizer import load_tokenizer
from ..reporting.watcher import Watcher
from ..settings.train_settings import TrainSettings, is_callable_name
from ..text import Prepared, input_bytes, prepare
from ..text.encode import beyond_vocabulary


@dataclass(frozen=True)
class TextData:
    """The rows for training and, optionally, for evaluation. ``total``: the number of optimizer steps."""

    tokenizer: Any
    rows: Prepared
    eval_rows: Prepared | None
    total: int

    def loader(self, settings: TrainSettings, device: torch.device) -> DataLoader:
        """A shuffled loader for all steps of the run. Each pass leaves out rows that do not fill a batch."""
        epochs = math.ceil(self.total * settings.accumulate / (self.rows.rows // settings.batch))
        return _loader(self.rows, settings, device, shuffle=True, epochs=epochs)

    def eval_loader(self, settings: TrainSettings, device: torch.device) -> DataLoader:
        """A loader of the evaluation data, in order, once."""
        assert self.eval_rows is not None
        return _loader(self.eval_rows, settings, device, shuffle=False, epochs=1)


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


def _loader(rows: Prepared, settings: TrainSettings, device: torch.device, *, shuffle: bool, epochs: int) -> DataLoader:
    return DataLoader(
        {name: str(path) for name, path in rows.arrays.items()},
        settings.batch,
        shuffle=shuffle,
        seed=settings.seed,
        device=device,
        drop_last=shuffle,
        epochs=epochs,
        transform=dict.fromkeys(rows.arrays, Cast(torch.int64)),
    )
