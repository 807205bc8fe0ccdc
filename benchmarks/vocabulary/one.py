"""Runs one case in this process."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.about import ROOT
from benchmarks.models.trainers import make
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from stormtorch.session.resources import outline
from stormtorch.streams.settings import Settings

_DATA = ROOT / "src" / "stormtorch" / "demo_data"
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
              "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}),
    "gemma": ("gemma2", {"vocab_size": 256000, "hidden_size": 3584, "intermediate_size": 14336, "head_dim": 256,
              "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True}),
}  # fmt: skip
_TINY = {"vocab_size": 8192, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    name, way = case.split(":")
    kind, shape = _SHAPES[name]
    config = AutoConfig.for_model(kind, **shape | (_TINY if options.tiny else {}), num_hidden_layers=options.layers)
    dtype = torch.float32 if options.tiny else torch.bfloat16
    model = _empty(config, dtype)
    known = {"parameters": sum(p.numel() for p in model.parameters()), "least_bytes": _least(model, options, way)}
    measured = _through_trainer if way == "trainer" else _by_command
    return known | measured(config, dtype, options, way)


def _least(model: nn.Module, options: argparse.Namespace, way: str) -> int:
    if way == "lora":
        model.requires_grad_(False)
    device = "cpu" if options.tiny else "cuda"
    optimizer = torch.optim.AdamW(model.parameters()) if way != "lora" else None
    found = outline(model, optimizer, Settings(vram=options.vram, device=device, ram="auto"))
    return found.placement.least_bytes


def _empty(config: Any, dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model.to(dtype)


def _made(config: Any, dtype: torch.dtype) -> Any:
    """The model with random weights, drawn on the GPU where there is one: the CPU takes minutes for billions."""
    model = _empty(config, dtype)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                made = torch.empty(parameter.shape, dtype=dtype, device=device)
                parameter.copy_(made.normal_(std=0.02, generator=generator))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    model.tie_weights()
    return model.train()


def _by_command(config: Any, dtype: torch.dtype, options: argparse.Namespace, way: str) -> dict[str, Any]:
    """``storm train`` as a user calls it, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="vocabulary-") as folder:
        _made(config, dtype).save_pretrained(f"{folder}/model")
        command = [
            sys.executable, "-m", "stormtorch.cli", "train", "--model", f"{folder}/model", "--tokenizer", str(_DATA),
            "--data", str(_DATA / "corpus.jsonl"), "--vram", options.vram, "--output", f"{folder}/run",
            "--steps", str(options.steps), "--batch", str(options.batch), "--sequence", str(options.sequence),
            "--accumulate", "2", "--clip", "1.0", "--chunked-loss", "--save-every", "0", "--no-save-optimizer",
            "--log-every", "1", "--dtype", "fp32" if options.tiny else "bf16", "--schedule", "constant",
            "--device", "cpu" if options.tiny else "cuda", *(["--lora-rank", "16"] if way == "lora" else []),
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True)
        records = [json.loads(line) for line in Path(f"{folder}/run/metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    tokens = 2 * options.batch * options.sequence
    ended = next(record for record in records if record["kind"] == "end")
    return {
        "losses": [record["loss"] for record in steps],
        "peak_bytes": ended.get("peak_vram_bytes"),
        "step_s": statistics.median(tokens / record["tokens_per_s"] for record in steps if record["tokens_per_s"]),
    }


class _Marks(TrainerCallback):
    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends_s.append(time.perf_counter())


class _Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, vocabulary: int, sequence: int, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randint(vocabulary, (count, sequence), generator=generator)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def _through_trainer(config: Any, dtype: torch.dtype, options: argparse.Namespace, _way: str) -> dict[str, Any]:
    marks, losses = _Marks(), list[torch.Tensor]()
    words = _Words(config.vocab_size, options.sequence, 2 * options.batch * options.steps)
    with tempfile.TemporaryDirectory(prefix="vocabulary-") as output:
        trainer = make(
            _made(config, dtype), words, output, batch=options.batch, steps=options.steps, cpu=options.tiny,
            storm={"vram": options.vram}, callbacks=[marks], gradient_accumulation_steps=2,
        )  # fmt: skip
        plain = trainer.training_step

        def training_step(*given: Any, **named: Any) -> torch.Tensor:
            loss: torch.Tensor = plain(*given, **named)
            losses.append(loss)
            return loss

        trainer.training_step = training_step
        trainer.train()
    peak = None if options.tiny else torch.cuda.max_memory_allocated()
    each = [b - a for a, b in zip(marks.ends_s, marks.ends_s[1:], strict=False)]
    sums = [float(a) + float(b) for a, b in zip(losses[::2], losses[1::2], strict=True)]
    return {"losses": sums, "peak_bytes": peak, "step_s": statistics.median(each)}
