"""What is saved is opened by transformers and peft as it is, and gives the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stormtorch.checkpoint import load_weights
from stormtorch.core.errors import CheckpointError, WrongModel

from .made import session_of

transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TOKENS = torch.arange(12).view(1, 12)


def llama(seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **settings}))


def qwen(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
        )
    )


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        loss = model(input_ids=(TOKENS + step) % 64, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS).logits.clone()
    model.train()
    return found


MODELS: dict[str, Any] = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "bf16": lambda: transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**SMALL), dtype=torch.bfloat16
    ),
    "moe": qwen,
}


@pytest.mark.parametrize("kind", MODELS)
def test_from_pretrained_gives_the_same_logits(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from stormtorch.checkpoint.content import parts

    monkeypatch.setattr(parts, "SHARD_BYTES", 20_000)
    model = MODELS[kind]()
    model.generation_config.max_new_tokens = 17
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with session_of(model, optimizer) as session:
        train(model, optimizer)
        session.save(tmp_path / "one")
        expected = logits(model)
    opened, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert opened.dtype == model.dtype
    assert type(opened) is type(model)
    assert opened.generation_config.max_new_tokens == 17
    assert torch.equal(logits(opened), expected)


def test_what_transformers_saves_is_loaded_as_it_is(tmp_path: Path) -> None:
    source = llama(3, tie_word_embeddings=True)
    source.save_pretrained(tmp_path / "one", max_shard_size="20KB")
    model = llama(4, tie_word_embeddings=True)
    with session_of(model):
        load_weights(model, tmp_path / "one")
        assert torch.equal(logits(model), logits(source))


def adapted(seed: int = 0, **settings: Any) -> Any:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings)
    base = llama()
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize(
    "settings", [{}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}], ids=["lora", "more", "dora"]
)
def test_an_adapter_is_saved_as_peft_saves_it(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = adapted(**settings)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with session_of(model, optimizer) as session:
        train(model, optimizer)
        session.save(tmp_path / "ours", wait=False)
        further = train(model, optimizer, start=2)
        session.synchronize()
        session.load(tmp_path / "ours")
        expected = logits(model)
    model.save_pretrained(tmp_path / "theirs")
    from safetensors.torch import load_file

    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not (tmp_path / "ours" / "model.safetensors").exists()
    opened = peft.PeftModel.from_pretrained(llama(), tmp_path / "ours")
    assert torch.equal(logits(opened), expected)

    again = adapted(seed=9, **settings)
    optimizer = torch.optim.AdamW([p for p in again.parameters() if p.requires_grad], lr=1e-2)
    with session_of(again, optimizer) as session:
        session.load(tmp_path / "ours")
        assert train(again, optimizer, start=2) == further


def test_the_base_of_an_adapted_model_is_loaded_from_its_own_files(tmp_path: Path) -> None:
    source = llama(5)
    source.save_pretrained(tmp_path / "base")
    model = adapted(modules_to_save=["lm_head"])
    with session_of(model), model.disable_adapter():
        assert "model.layers.0.self_attn.q_proj.weight" in load_weights(model, tmp_path / "base")
        assert torch.equal(logits(model), logits(source))
    trained = model.base_model.model.lm_head.modules_to_save["default"].weight
    assert torch.equal(trained, source.lm_head.weight)


def test_adapters_and_whole_models_are_told_apart(tmp_path: Path) -> None:
    with session_of(llama()) as session:
        session.save(tmp_path / "whole")
    with session_of(adapted()) as session:
        session.save(tmp_path / "adapter")
        with pytest.raises(WrongModel, match="holds a whole model"):
            session.load(tmp_path / "whole")
    with session_of(llama()) as session, pytest.raises(WrongModel, match="holds an adapter"):
        session.load(tmp_path / "adapter")


def test_what_is_trained_beside_an_adapter_is_not_lost_unsaid(tmp_path: Path) -> None:
    model = adapted()
    model.base_model.model.model.norm.weight.requires_grad_(True)
    with session_of(model) as session, pytest.raises(CheckpointError, match=r"norm.weight' are trained but not part"):
        session.save(tmp_path / "one")
    assert list(tmp_path.iterdir()) == []
