"""A trainer of transformers with its defaults, with and without STORM."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from stormtorch.integrations.huggingface import StormTrainer


def make(
    model: Any,
    rows: Any,
    output: str,
    *,
    batch: int,
    steps: int,
    storm: dict[str, Any] | None,
    callbacks: list[Any],
    optimizer: torch.optim.Optimizer | None = None,
    cpu: bool | None = None,
    **arguments: Any,
) -> Any:
    """``storm``: settings of `storm.stream`; None: the trainer of transformers. ``arguments`` are those of
    ``TrainingArguments``, whose defaults hold but for logs and files."""
    settings: dict[str, Any] = {
        "model": model,
        "args": TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=batch,
            max_steps=steps,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available() if cpu is None else cpu,
            disable_tqdm=True,
            **arguments,
        ),
        "train_dataset": rows,
        "callbacks": callbacks,
    }
    if optimizer is not None:
        settings["optimizers"] = (optimizer, None)
    return Trainer(**settings) if storm is None else StormTrainer(**settings, storm=storm)
