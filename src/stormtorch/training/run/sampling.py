"""Samples of the model: greedy continuations of the user's prompts."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import nn

from ...core.errors import SettingError
from ..model.untouched import untouched


def check_can_sample(model: nn.Module) -> None:
    if not callable(getattr(model, "generate", None)):
        raise SettingError(f"{type(model).__name__} has no generate(). Leave out --sample-prompts.")


def _positions(model: nn.Module) -> int:
    """The model's positions: a longer continuation would end the run."""
    config: Any = getattr(model, "config", None)
    known = getattr(config.get_text_config(), "max_position_embeddings", None) if config is not None else None
    return known if isinstance(known, int) else sys.maxsize


def sample(model: nn.Module, tokenizer: Any, prompt: str, *, tokens: int, device: torch.device) -> str:
    """The continuation of a prompt, without the prompt, up to the model's positions. Leaves no trace in training."""
    generator: Any = model
    with untouched(model, device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns that weights and inputs are on different devices
        given = torch.tensor([tokenizer.encode(prompt)], dtype=torch.int64).to(device)
        most = min(tokens, _positions(model) - given.shape[1])
        if most < 1 or not given.numel():
            return ""
        written = generator.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=most,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
        text: str = tokenizer.decode(written[0, given.shape[1] :], skip_special_tokens=True)
    return text
