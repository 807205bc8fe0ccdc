"""Small models, data and settings for trainers; every call gives the same ones again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from stormtorch.integrations.huggingface import StormTrainer

VOCABULARY = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
VRAM = 120 * 1024  # for 136 KiB of weights in fp32, and for their gradients
BOTH: list[tuple[Any, dict[str, Any]]] = [(Trainer, {}), (StormTrainer, {"storm": {"vram": VRAM}})]


def llama(dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **config}))  # type: ignore[no-untyped-call]  # theirs
    return model.to(dtype)


def qwen(dtype: torch.dtype = torch.float32) -> Any:
    """With biases in attention and tied embeddings, unlike Llama."""
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True))  # type: ignore[no-untyped-call]
    return model.to(dtype)


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random rows; in some of them the first labels do not count, so that micro-batches differ in weight."""

    def __init__(self, count: int = 40, length: int = 12) -> None:
        torch.manual_seed(1)
        self._ids = torch.randint(0, VOCABULARY, (count, length))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, labels = self._ids[index], self._ids[index].clone()
        labels[: index % 5] = -100
        return {"input_ids": ids, "labels": labels}


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    """Accumulation 4, clipping at 1.0 (the default), every step logged, on the CPU."""
    return TrainingArguments(**{**common(folder), "max_grad_norm": 1.0, **changed})


def common(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }


def logged(trainer: Any) -> list[dict[str, float]]:
    """What the trainer logged of each step and each evaluation, but for times."""
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "step", "mean_token_accuracy")
    return [
        {key: entry[key] for key in kept if key in entry}
        for entry in trainer.state.log_history
        if "loss" in entry or "eval_loss" in entry
    ]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"different bits in {different}"


class StopAt(TrainerCallback):
    """Raises after a step, as a crash would."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == self._step:
            raise RuntimeError("stopped on purpose")
