"""A Llama of a few thousand weights, a byte tokenizer, a text: what a run needs and no more."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stormtorch
from stormtorch.training.reporting import Status
from stormtorch.training.run.train import train
from stormtorch.training.settings.train_settings import TrainSettings

DEMO = Path(stormtorch.__file__).parent / "demo_data"
TEXT = "The storm carries each layer to the device and back. What fits stays there, what does not is fetched in time. "


class Quiet:
    """A watcher that remembers, and can do something after a step."""

    def __init__(self, after: Callable[[int], None] | None = None) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []
        self.shown: list[Status] = []
        self._after = after

    def say(self, line: str) -> None:
        self.said.append(line)

    def warn(self, line: str) -> None:
        self.warned.append(line)

    def reading(self, total_bytes: int) -> Callable[[int], None]:
        assert total_bytes > 0
        return lambda _: None

    def show(self, status: Status) -> None:
        self.shown.append(status)
        if self._after is not None:
            self._after(status.step)

    def log(self, status: Status) -> None:
        pass


def write_model(folder: Path, **changes: Any) -> Path:
    """A directory with a config and a tokenizer, without weights."""
    config = {
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": 256,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((DEMO / name).read_bytes())
    return folder


def with_weights(folder: Path, *, shard: str = "5GB", dtype: torch.dtype = torch.float32, **changes: object) -> Path:
    """A directory as ``save_pretrained`` writes it."""
    transformers = pytest.importorskip("transformers")
    write_model(folder, **changes)
    torch.manual_seed(5)
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def write_text(path: Path, documents: int = 20) -> Path:
    lines = [json.dumps({"text": f"{index}. {TEXT}"}) for index in range(documents)]
    path.write_text("\n".join(lines) + "\n")
    return path


def settings(folder: Path, **changes: Any) -> TrainSettings:
    """A run of eight steps in ``folder``, where the model and the text are made if they are not given."""
    given: dict[str, Any] = {
        "output": str(folder / "run"),
        "device": "cpu",
        "dtype": "fp32",
        "sequence": 32,
        "batch": 2,
        "steps": 8,
        "lr": 1e-3,
        "save_every": 0,
        "log_every": 1,
        **changes,
    }
    if "model" not in given:
        given["model"] = str(write_model(folder / "model"))
    if "data" not in given:
        given["data"] = (str(write_text(folder / "text.jsonl")),)
    return TrainSettings(**given)


def run(chosen: TrainSettings, watcher: Quiet | None = None) -> int:
    return train(chosen, watcher or Quiet())


def records(chosen: TrainSettings, kind: str = "step") -> list[dict[str, Any]]:
    lines = (Path(chosen.output) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def losses(chosen: TrainSettings) -> dict[int, float]:
    found = records(chosen)
    assert len({record["step"] for record in found}) == len(found), "a step was written twice"
    return {record["step"]: record["loss"] for record in found}


def checkpoint(chosen: TrainSettings, step: int) -> Path:
    return Path(chosen.output) / "checkpoints" / f"step-{step:08d}"


def steps_saved(chosen: TrainSettings) -> list[int]:
    return [int(path.name[5:]) for path in sorted((Path(chosen.output) / "checkpoints").iterdir())]


class OwnModel(nn.Module):
    """A model with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(257, 16), nn.Linear(16, 257)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"logits": logits, "loss": loss}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Import this into a module of tests: two threads on a busy machine are slower for models this small.

    Where the CPU has no bf16, torch's first such product fails inside oneDNN, says so at length, and takes another way
    for the rest of the process.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matrix = torch.ones(64, 32, dtype=torch.bfloat16)
        nn.functional.linear(matrix, matrix)
        torch.mm(matrix.t(), matrix)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
