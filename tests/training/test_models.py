"""Every kind of model that a run may be given, and what is said of one that cannot be used."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stormtorch.core.errors import OutOfBudget, SettingError, StormError
from stormtorch.training.model import hf_model
from stormtorch.training.model.build import build
from stormtorch.training.settings.train_settings import TrainSettings

from .tiny import Quiet, checkpoint, losses, one_thread, run, settings, with_weights, write_model, write_text  # noqa: F401

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("shard", ["5GB", "40KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_weights_go_straight_home(tmp_path: Path, shard: str, tied: bool) -> None:
    """The first loss is that of the model in the files, so they were all read."""
    model = with_weights(tmp_path / "model", shard=shard, tie_word_embeddings=tied)
    chosen = settings(tmp_path, model=str(model), steps=2)
    built = build(chosen, values=True)
    assert built.weights == model
    assert all(parameter.is_meta for parameter in built.model.parameters())
    assert not any(buffer.is_meta for buffer in built.model.buffers())
    watcher = Quiet()
    assert run(chosen, watcher) == 0
    assert any("straight into home memory" in line for line in watcher.said)
    first = losses(chosen)[1]
    other = settings(tmp_path, model=str(tmp_path / "model"), steps=2, output=str(tmp_path / "in_ram"))
    assert first == _first_loss_in_ram(other)


def _first_loss_in_ram(chosen: TrainSettings) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_model, "why_not_direct", lambda *_: "a test says so")
        watcher = Quiet()
        assert run(chosen, watcher) == 0
    assert any("loaded by transformers" in line for line in watcher.said)
    return losses(chosen)[1]


def test_a_trained_model_opens_and_trains_on(tmp_path: Path) -> None:
    """What one run saved is a model for the next; bf16 files serve a run in fp32."""
    first = settings(tmp_path, dtype="bf16", steps=2)
    assert run(first) == 0
    saved = checkpoint(first, 2)
    config = json.loads((saved / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    second = settings(tmp_path, model=str(saved), output=str(tmp_path / "second"), steps=1)
    assert run(second) == 0
    weights = load_file(checkpoint(second, 1) / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_what_generate_needs_is_kept(tmp_path: Path) -> None:
    """Also a file that transformers reads and would refuse to write: a temperature without sampling."""
    model = with_weights(tmp_path / "model")
    given = {"eos_token_id": [256, 10], "temperature": 0.6, "do_sample": False}
    (model / "generation_config.json").write_text(json.dumps(given))
    chosen = settings(tmp_path, model=str(model), steps=1)
    built = build(chosen, values=True)
    assert built.model.generation_config.eos_token_id == [256, 10]  # type: ignore[union-attr]
    assert run(chosen) == 0
    assert json.loads((checkpoint(chosen, 1) / "generation_config.json").read_text()) == given


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(SettingError, match="is quantised"):
        run(settings(tmp_path, model=str(model), steps=1))


def test_names_that_need_conversion_are_left_to_transformers(tmp_path: Path) -> None:
    """A folder of the base model alone: its names lack the prefix."""
    folder = write_model(tmp_path / "model", tie_word_embeddings=True)
    torch.manual_seed(5)
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.LlamaModel(config).save_pretrained(folder)
    chosen = settings(tmp_path, model=str(folder), steps=1)
    watcher = Quiet()
    assert run(chosen, watcher) == 0
    assert any("loaded by transformers, then moved to home memory: its names need" in line for line in watcher.said)


def test_a_config_alone_gives_random_weights_by_the_seed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    names = {"a": 0, "b": 0, "c": 1}
    found = {}
    for name, seed in names.items():
        chosen = settings(
            tmp_path,
            model=str(folder / "config.json"),
            tokenizer=str(folder / "tokenizer.json"),
            output=str(tmp_path / name),
            seed=seed,
            steps=2,
        )
        assert run(chosen) == 0
        found[name] = losses(chosen)
    assert found["a"] == found["b"]
    assert found["a"][1] != found["c"][1]


def test_adapters_train_alone_and_open_with_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = with_weights(tmp_path / "model")
    before = load_file(model / "model.safetensors")
    chosen = settings(tmp_path, model=str(model), lora_rank=4, lr=1e-2, steps=4)
    watcher = Quiet()
    assert run(chosen, watcher) == 0
    assert any("of them trained" in line and "straight into home memory" in line for line in watcher.said)
    folder = checkpoint(chosen, 4)
    assert (folder / "adapter_config.json").is_file()
    assert not (folder / "model.safetensors").exists()
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    moved = [p for n, p in adapted.named_parameters() if "lora_B" in n]
    assert len(moved) == 7 * 3
    assert all(bool((parameter != 0).any()) for parameter in moved)
    assert torch.equal(before["lm_head.weight"], adapted.base_model.model.lm_head.weight)


def test_adapters_name_their_base_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft reads a path from the directory that it runs in: a project that is moved as a whole still opens."""
    peft = pytest.importorskip("peft")
    (tmp_path / "here").mkdir()
    with_weights(tmp_path / "here" / "model", name_or_path="/home/of/its/author")
    monkeypatch.chdir(tmp_path / "here")
    write_text(Path("text.jsonl"))
    chosen = settings(tmp_path, model="model", data=("text.jsonl",), output="run", lora_rank=2, steps=1)
    assert run(chosen) == 0
    config = checkpoint(chosen, 1) / "adapter_config.json"
    assert json.loads(config.read_text())["base_model_name_or_path"] == "model"
    assert str(tmp_path) not in config.read_text()
    (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")
    peft.AutoPeftModelForCausalLM.from_pretrained("run/checkpoints/step-00000001")
    assert run(dataclasses.replace(chosen, steps=2)) == 0


def test_adapters_name_a_base_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its cache a model's folder says which it is, and at which revision; that is what a machine elsewhere needs."""
    peft = pytest.importorskip("peft")
    revision = "0123456789abcdef" * 2 + "01234567"
    base = with_weights(tmp_path / "hub" / "models--owner--small-llama" / "snapshots" / revision)
    chosen = settings(tmp_path, model=str(base), lora_rank=2, steps=1)
    assert run(chosen) == 0
    found = json.loads((checkpoint(chosen, 1) / "adapter_config.json").read_text())
    assert (found["base_model_name_or_path"], found["revision"]) == ("owner/small-llama", revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(
        checkpoint(chosen, 1), cache_dir=str(tmp_path / "hub"), local_files_only=True
    )
    assert torch.equal(adapted.base_model.model.lm_head.weight, load_file(base / "model.safetensors")["lm_head.weight"])
    assert run(dataclasses.replace(chosen, steps=2)) == 0


def test_adapters_begin_as_peft_has_them(tmp_path: Path) -> None:
    """Put into a model without memory, they have no values of peft's; they must get them: A uniform, B zero."""
    pytest.importorskip("peft")
    built = build(settings(tmp_path, model=str(with_weights(tmp_path / "model")), lora_rank=4), values=True)
    found = {name: p.detach() for name, p in built.model.named_parameters() if p.requires_grad}
    assert len(found) == 2 * 7 * 3
    for name, parameter in found.items():
        bound = parameter.shape[1] ** -0.5
        assert not parameter.is_meta
        most = float(parameter.abs().max())
        assert most == 0.0 if "lora_B" in name else 0.8 * bound < most <= bound, name


def test_an_embedding_can_have_adapters_too(tmp_path: Path) -> None:
    """Peft keeps those as parameters, not as modules. A begins as zero there: the first loss is the model's own."""
    peft = pytest.importorskip("peft")
    model = with_weights(tmp_path / "model")
    targets = ("embed_tokens", "q_proj")
    chosen = settings(tmp_path, model=str(model), lora_rank=4, lora_targets=targets, lr=1e-2, steps=3)
    plain = settings(tmp_path, model=str(model), steps=1, output=str(tmp_path / "plain"))
    assert run(chosen) == 0
    assert run(plain) == 0
    assert losses(chosen)[1] == losses(plain)[1]
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(checkpoint(chosen, 3), dtype=torch.float32)
    moved = [p for n, p in adapted.named_parameters() if "lora_embedding_A" in n]
    assert len(moved) == 1
    assert bool((moved[0] != 0).any())


def test_adapters_need_a_model_that_is_somewhere(tmp_path: Path) -> None:
    """Random weights under them would be saved nowhere."""
    with pytest.raises(SettingError, match="has no weights, and checkpoints hold adapters without their model"):
        run(settings(tmp_path, lora_rank=4))


def test_a_rank_beyond_the_model_is_refused(tmp_path: Path) -> None:
    """It would take all of the machine's RAM."""
    pytest.importorskip("peft")
    model = with_weights(tmp_path / "model")
    with pytest.raises(SettingError, match=r"lora_rank=1000000 is larger than .* the longest is 257"):
        run(settings(tmp_path, model=str(model), lora_rank=1_000_000))


def test_a_model_that_ram_cannot_hold_is_refused_before_it_is_made(tmp_path: Path) -> None:
    """The system would kill the process that makes it, without a word."""
    model = write_model(tmp_path / "model", hidden_size=1 << 20, intermediate_size=1 << 20)
    began = torch.get_rng_state()
    with pytest.raises(OutOfBudget, match=r"Cannot make .*model in RAM \(its weights alone take .* TiB, and"):
        build(settings(tmp_path, model=str(model)), values=True)
    assert torch.equal(torch.get_rng_state(), began)


def test_a_target_that_is_no_module_is_refused(tmp_path: Path) -> None:
    """Beside one that is, peft would leave it out without a word."""
    pytest.importorskip("peft")
    model = with_weights(tmp_path / "model")
    with pytest.raises(SettingError, match=r"no module 'qq_proj' to adapt\. Did you mean q_proj"):
        run(settings(tmp_path, model=str(model), lora_rank=2, lora_targets=("k_proj", "qq_proj")))


def test_an_encoder_is_no_causal_model(tmp_path: Path) -> None:
    """It would see what it is to predict, and learn nothing else."""
    small = {"model_type": "bert", "bos_token_id": None, "num_key_value_heads": None}
    model = write_model(tmp_path / "model", **small)
    with pytest.raises(SettingError, match="sees the tokens that it predicts"):
        run(settings(tmp_path, model=str(model)))
    write_model(tmp_path / "model", **small, is_decoder=True)
    assert run(settings(tmp_path, model=str(model), steps=1)) == 0


@pytest.mark.parametrize(
    "changes", [{"pad_token_id": -1}, {"output_attentions": True}], ids=["pad token", "attentions"]
)
def test_what_could_not_be_saved_is_refused_before_the_first_step(tmp_path: Path, changes: dict[str, Any]) -> None:
    """transformers reads it, and says only when it is to write it that it will not."""
    model = write_model(tmp_path / "model", **changes)
    chosen = settings(tmp_path, model=str(model), steps=2)
    with pytest.raises(SettingError, match="cannot be saved with a checkpoint"):
        run(chosen)
    assert not (Path(chosen.output) / "metrics.jsonl").exists()


OWN = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(257, 16), nn.Linear(16, 257)
    def forward(self, input_ids, labels):
        return self.head(self.embed(input_ids))

class WithLoss(Own):
    def forward(self, input_ids, labels):
        return {"loss": loss(super().forward(input_ids, labels), {"labels": labels})}

def loss(output, batch):
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

def no_model():
    return 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_module_of_a_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_module_of_a_test", raising=False)
    return "own_module_of_a_test"


def test_models_of_the_users_own(tmp_path: Path, own_module: str) -> None:
    tokenizer = str(write_model(tmp_path / "model"))
    inside = settings(tmp_path, model=f"{own_module}:WithLoss", tokenizer=tokenizer, accumulate=2, lr=0.1)
    assert run(inside) == 0
    outside = settings(
        tmp_path,
        model=f"{own_module}:Own",
        loss=f"{own_module}:loss",
        tokenizer=tokenizer,
        accumulate=2,
        lr=0.1,
        output=str(tmp_path / "outside"),
    )
    assert run(outside) == 0
    assert losses(inside) == losses(outside)
    assert losses(inside)[8] < losses(inside)[1]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nowhere", "nowhere does not exist"),
        ("some/model", "Is it a name on the Hub? Fetch it first: hf download some/model --local-dir FOLDER."),
        ("empty", "empty has no config.json"),
        ("no_such_module:make", "cannot import no_such_module"),
        ("own_module_of_a_test:absent", "has no callable 'absent'"),
        ("own_module_of_a_test:no_model", "returned a int. Accepted: an nn.Module"),
        ("own_module_of_a_test:Own", "The loss is a tensor of shape (2, 32, 257)"),
    ],
)
def test_models_that_cannot_be_used(tmp_path: Path, own_module: str, model: str, words: str) -> None:
    assert own_module
    tokenizer = str(write_model(tmp_path / "model"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingError) as caught:
        run(settings(tmp_path, model=model, tokenizer=tokenizer, steps=1))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "own_module_of_a_test:absent"},
        {"model": "own_module_of_a_test:Own", "loss": "own_module_of_a_test:absent"},
        {"optimizer": "adamx"},
        {"optimizer": "sgd", "eps": 1e-8},
    ],
)
def test_names_of_nothing_are_found_before_the_data_is_read(
    tmp_path: Path, own_module: str, changes: dict[str, Any]
) -> None:
    assert own_module
    chosen = settings(tmp_path, **changes, tokenizer=str(write_model(tmp_path / "model")))
    watcher = Quiet()
    with pytest.raises(SettingError):
        run(chosen, watcher)
    assert watcher.said == []


def test_a_damaged_file_of_weights_is_named(tmp_path: Path) -> None:
    model = with_weights(tmp_path / "model", shard="40KB")
    [*_, last] = sorted(model.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(StormError, match=last.name):
        run(settings(tmp_path, model=str(model), steps=1))
    last.unlink()
    with pytest.raises(StormError, match=last.name):
        run(settings(tmp_path, model=str(model), steps=1))


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    model = with_weights(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(16)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StormError, match=r"model\.norm\.weight"):
        run(settings(tmp_path, model=str(model), steps=1))
