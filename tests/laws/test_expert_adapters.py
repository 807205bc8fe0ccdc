"""peft adapts fused experts by parametrizing their parameter in each forward. Streamed, that gives the numbers of plain
PyTorch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from stormtorch.session.api import Session
from stormtorch.streams.settings import Settings, Trial

from ..thinning import daily
from .models import adamw, jitter, one_thread, sgd  # noqa: F401  # one is a fixture

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

VOCABULARY, LAYERS = 64, 8
ADAPTERS = {
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


def made() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = peft.get_peft_model(
        transformers.Qwen3MoeForCausalLM(config), peft.LoraConfig(r=4, lora_alpha=8, **ADAPTERS)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    assert any("experts" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return model


def tokens(number: int, length: int = 12) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(number))


def optimizer_of(model: Any, device: torch.device) -> torch.optim.Optimizer:
    """AdamW where plain PyTorch trains on the CPU too: torch's fused AdamW rounds otherwise on a GPU."""
    return adamw(model) if device.type == "cpu" else sgd(model)


def train(model: Any, optimizer: torch.optim.Optimizer, device: torch.device, steps: int = daily(3, 4)) -> list[Any]:
    """Losses, norms and, in between, what the model says without gradients."""
    kind, limit = (2.0, 0.02) if device.type == "cpu" else (math.inf, 0.005)  # a GPU adds in another order
    seen: list[Any] = []
    for number in range(steps):
        for part in range(2):
            given = tokens(10 * number + part).to(device)
            loss = model(input_ids=given, labels=given).loss
            loss.backward()
            seen.append(loss.item())
        trained = [p for p in model.parameters() if p.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(trained, limit, norm_type=kind)
        seen.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append(model(input_ids=tokens(number, 1).to(device)).logits.double().sum().item())
    return seen


@pytest.mark.parametrize(
    "activations", ["auto", "recompute", *(pytest.param(a, marks=pytest.mark.wide) for a in ("keep", "offload"))]
)
def test_the_numbers_are_those_of_plain_pytorch(activations: str, device: torch.device) -> None:
    plain = made().to(device)
    expected = train(plain, optimizer_of(plain, device), device)
    model = made()
    optimizer = optimizer_of(model, device)
    total = sum(parameter.nbytes for parameter in model.parameters())
    settings = Settings(vram=int(total * 0.3) + (64 << 20) * (device.type == "cuda"), device=device)
    settings = Settings(**{**vars(settings), "activations": activations})
    with Session(model, optimizer, settings, trial=Trial(delay=jitter(device, 0), poison=True)):
        assert train(model, optimizer, device) == expected
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert list(weights) == list(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(weights[name], tensor.cpu()), name
    for name, parameter in model.named_parameters():
        assert type(parameter) is torch.nn.Parameter, name


def test_adapters_that_are_merged_and_switched_off() -> None:
    models = made().eval(), made().eval()
    with torch.no_grad(), Session(models[1], None, Settings(vram="512KiB", device="cpu"), trial=Trial(poison=True)):
        for number in range(3):
            assert torch.equal(*(m(tokens(number)).logits for m in models))
        for each in models:
            each.disable_adapter_layers()
        assert torch.equal(*(m(tokens(3)).logits for m in models))
        for each in models:
            each.enable_adapter_layers()
            each.merge_adapter()
        for number in range(3):
            assert torch.equal(*(m(tokens(number, 1)).logits for m in models))
