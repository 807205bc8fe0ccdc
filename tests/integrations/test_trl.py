"""TRL's ``SFTTrainer``, streamed: the plain one's numbers, with and without adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")
pytest.importorskip("datasets")

import datasets  # type: ignore[import-untyped]
import peft
from transformers import AutoModelForCausalLM
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from stormtorch.core.errors import SettingError
from stormtorch.integrations.huggingface import storm_trainer

from .small import VRAM, assert_same, common, llama, logged, weights
from .words import word_tokenizer

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"what is {number}"},
            {"role": "assistant", "content": f"{number} is a number " * (1 + number % 3)},
        ]
    }
    for number in range(16)
]


def config(folder: Path, **changed: Any) -> SFTConfig:
    given = {**common(folder), "gradient_accumulation_steps": 4, "max_length": 32, **changed}
    return SFTConfig(**given)


def trained(folder: Path, model: Any, *, streamed: bool, **more: Any) -> Any:
    kind = storm_trainer(SFTTrainer) if streamed else SFTTrainer
    args = config(folder, **more.pop("changed", {}))
    if streamed:
        more["storm"] = {"vram": VRAM}
    data = datasets.Dataset.from_list(CHATS)
    trainer = kind(
        model=model, args=args, train_dataset=data, eval_dataset=data, processing_class=word_tokenizer(), **more
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("changed", [{}, {"packing": True, "bf16": False}], ids=["chat", "packed"])
def test_full(changed: dict[str, Any], tmp_path: Path) -> None:
    plain, streamed = (
        trained(tmp_path, llama(), streamed=streamed, changed={"eval_strategy": "epoch", **changed})
        for streamed in (False, True)
    )
    assert len(logged(plain)) >= 2
    assert logged(streamed) == logged(plain)
    assert_same(weights(streamed), weights(plain))
    assert streamed.storm_report.device_peak_bytes <= VRAM


def test_adapters(tmp_path: Path) -> None:
    """LoRA, with the checkpointing that TRL turns on; opened by PEFT."""
    saving = {"save_strategy": "epoch", "num_train_epochs": 2, "bf16": False}

    def run(name: str, streamed: bool, **more: Any) -> Any:
        lora = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
        return trained(tmp_path / name, llama(), streamed=streamed, peft_config=lora, changed=saving, **more)

    plain, streamed = run("plain", False), run("streamed", True)
    assert len(logged(plain)) == 4
    assert logged(streamed) == logged(plain)
    assert_same(weights(streamed), weights(plain))
    folder = tmp_path / "streamed" / "checkpoint-4"
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {path.name for path in folder.iterdir()}
    opened = peft.PeftModel.from_pretrained(llama(), folder)
    assert_same(dict(opened.state_dict()), weights(streamed))


def test_a_model_by_its_path(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    streamed = trained(tmp_path / "run", str(tmp_path / "model"), streamed=True, changed={"max_steps": 2})
    streamed.save_model(str(tmp_path / "out"))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(dict(opened.state_dict()), weights(streamed))


def test_its_own_offloading_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="activation_offloading=True and STORM both move activations"):
        trained(tmp_path, llama(), streamed=True, changed={"activation_offloading": True})
