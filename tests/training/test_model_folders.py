"""Folders as people have them: half downloaded, converted, of another kind. No weights are made up."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stormtorch.core.errors import StormError
from stormtorch.training.model.lora import linear_layers

from .tiny import Quiet, losses, one_thread, records, run, settings, write_model  # noqa: F401

transformers = pytest.importorskip("transformers")
SMALL: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 256,
    "eos_token_id": 256,
    "bos_token_id": None,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "max_position_embeddings": 64}


def saved(folder: Path, config: Any, **how: Any) -> Path:
    """A model with weights and a tokenizer."""
    write_model(folder)
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder, **how)
    return folder


def refused(folder: Path, model: Path, **changes: Any) -> str:
    with pytest.raises(StormError) as caught:
        run(settings(folder, model=str(model), steps=1, **changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (transformers.GPT2Config(**GPT2, vocab_size=257, eos_token_id=256), "straight into home memory"),
        (transformers.Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True), "straight into home memory"),
        (transformers.Gemma2Config(**SMALL, head_dim=8), "straight into home memory"),
        (transformers.MixtralConfig(**SMALL, num_local_experts=4), "needs? transformers' conversion"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_architectures_resume_exactly(tmp_path: Path, config: Any, said: str) -> None:
    """Tied weights, Conv1D, soft caps, experts that transformers packs; dropout where GPT-2 has it."""
    model = str(saved(tmp_path / "model", config))
    chosen = settings(tmp_path, model=model, steps=4, save_every=2)
    watcher = Quiet()
    assert run(chosen, watcher) == 0
    [line] = [line for line in watcher.said if line.startswith("model ")]
    assert said.replace("needs? ", "") in line
    expected = losses(chosen)
    newest = Path(chosen.output) / "checkpoints" / "step-00000004"
    _, found = transformers.AutoModelForCausalLM.from_pretrained(newest, output_loading_info=True)
    assert not any(found.values()), found
    shutil.rmtree(newest)
    assert run(chosen) == 0
    assert losses(chosen) == expected
    [load] = records(chosen, "load")[:1]
    assert load["bytes"] >= (tmp_path / "model" / "model.safetensors").stat().st_size


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_an_index_without_its_shards_is_no_config_alone(tmp_path: Path, kind: str) -> None:
    model = write_model(tmp_path / "model")
    shard = kind.replace(".", "-00001-of-00002.")
    (model / f"{kind}.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"model.embed_tokens.weight": shard}})
    )
    assert shard in refused(tmp_path, model)
    (model / f"{kind}.index.json").write_text("{")
    assert f"{kind}.index.json is damaged" in refused(tmp_path, model)


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", transformers.LlamaConfig(**SMALL))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "9 weights are not in its files, 'model.layers.2." in refused(tmp_path, model)


def test_a_pickled_file_of_weights(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", transformers.LlamaConfig(**SMALL))
    expected = settings(tmp_path, model=str(model), steps=2)
    assert run(expected) == 0
    pickled = shutil.copytree(model, tmp_path / "pickled")
    weights = transformers.AutoModelForCausalLM.from_pretrained(model).state_dict()
    (pickled / "model.safetensors").unlink()
    torch.save(weights, pickled / "pytorch_model.bin")
    chosen = settings(tmp_path, model=str(pickled), steps=2, output=str(tmp_path / "other"))
    assert run(chosen) == 0
    assert losses(chosen) == losses(expected)
    (pickled / "pytorch_model.bin").write_bytes(b"garbage" * 100)
    assert f"--model {pickled} cannot be loaded" in refused(tmp_path, pickled, output=str(tmp_path / "third"))


def test_other_weights_beside_the_models_own_are_left_alone(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", transformers.LlamaConfig(**SMALL))
    (model / "consolidated.safetensors").write_bytes(b"another form of the same")
    (model / "adapter_model.safetensors").write_bytes(b"something trained before")
    chosen = settings(tmp_path, model=str(model), steps=1)
    assert run(chosen) == 0
    [load] = records(chosen, "load")
    assert load["bytes"] == (model / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "vit"}, "No causal language model can be built from a config of type 'vit'"),
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"num_attention_heads": 5}, "config.json cannot be used"),
        ({"num_attention_heads": "many"}, "num_attention_heads"),
        ({"auto_map": {"AutoConfig": "own.Config"}, "model_type": "own"}, "custom code"),
    ],
)
def test_configs_that_cannot_be_built(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """Said of the config, not of the tokenizer beside it; and transformers does not ask whether code may run."""
    model = write_model(tmp_path / "model", **changes)
    assert words in refused(tmp_path, model)


def test_a_folder_of_adapters_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    assert "holds adapters and no model" in refused(tmp_path, tmp_path / "adapters")


def test_a_generation_config_that_is_damaged(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "generation_config.json").write_text('{"temperature": 0.6, "bad')
    assert f"{model / 'generation_config.json'} cannot be used" in refused(tmp_path, model)


def test_rows_beyond_the_models_positions(tmp_path: Path) -> None:
    learnt = write_model(tmp_path / "learnt", model_type="gpt2", **GPT2)
    assert "sequence=65: the model has 64 positions" in refused(tmp_path, learnt, sequence=65)
    computed = write_model(tmp_path / "computed", max_position_embeddings=16)
    watcher = Quiet()
    assert run(settings(tmp_path, model=str(computed), steps=1), watcher) == 0
    assert watcher.warned == ["Rows of 32 tokens are longer than the 16 positions that the model was made for."]


def test_samples_end_where_positions_do(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "learnt", model_type="gpt2", **GPT2))
    prompts = ("The storm", "long " * 50)
    chosen = settings(tmp_path, model=model, steps=1, sample_prompts=prompts, sample_tokens=500)
    assert run(chosen) == 0
    found = records(chosen, "sample")  # at the end, though no sample_every is given
    assert [len(record["text"]) > 0 for record in found] == [True, False]


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")
def test_adapters_beside_experts(tmp_path: Path) -> None:
    """The router and the experts are no linear layers: by default they are left alone, by name refused."""
    pytest.importorskip("peft")
    config = transformers.MixtralConfig(**SMALL, num_local_experts=4)
    model = saved(tmp_path / "model", config)
    assert linear_layers(transformers.AutoModelForCausalLM.from_config(config)) == [
        "k_proj",
        "o_proj",
        "q_proj",
        "v_proj",
    ]
    assert run(settings(tmp_path, model=str(model), steps=2, lora_rank=2)) == 0
    said = refused(
        tmp_path, model, lora_rank=2, lora_targets=("q_proj", "w1", "w2", "w3"), output=str(tmp_path / "other")
    )
    assert "is not a linear layer" in said


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1")
    assert "Give --tokenizer PATH" in refused(tmp_path, model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    assert f"--model {model} has no tokenizer. Give --tokenizer PATH" in refused(tmp_path, model)


def test_adapters_go_on_with_their_own_model_alone(tmp_path: Path) -> None:
    """They fit any model of that shape, and a checkpoint holds nothing else."""
    pytest.importorskip("peft")
    model = saved(tmp_path / "model", transformers.LlamaConfig(**SMALL))
    chosen = settings(tmp_path, model=str(model), steps=4, save_every=2, lora_rank=2)
    assert run(chosen) == 0
    expected = losses(chosen)
    shutil.rmtree(Path(chosen.output) / "checkpoints" / "step-00000004")
    moved = shutil.copytree(model, tmp_path / "moved")
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(StormError, match="weights of the model: "):
        run(chosen)
    assert run(dataclasses.replace(chosen, model=str(moved))) == 0
    assert losses(chosen) == expected


def test_a_package_that_is_missing_is_missed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    model = write_model(tmp_path / "model")
    assert "--tensorboard needs the package" in refused(tmp_path, model, tensorboard=True)
    assert not (tmp_path / "run" / "data").exists()
