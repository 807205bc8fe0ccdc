"""Of fused experts a call without gradients loads those that its tokens were routed to, where these are few.

Freed memory is filled with NaN, so that an expert that is read and was not loaded shows. The plain model has the right
numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch.core.tags import Tag
from stormtorch.session.api import Session
from stormtorch.streams.settings import Settings, Trial
from stormtorch.streams.units import placement
from stormtorch.streams.units.partition import partition

from .models import jitter, one_thread  # noqa: F401  # one is a fixture
from .test_inference import Watched

transformers = pytest.importorskip("transformers")

EXPERTS, CHOSEN, LAYERS, WIDTH, INNER, VOCABULARY = 16, 2, 8, 32, 48, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": CHOSEN,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
CPU = torch.device("cpu")
EXPERT_BYTES = 3 * WIDTH * INNER * 4


def qwen(experts: str = "grouped_mm") -> Any:
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_experts=EXPERTS, moe_intermediate_size=INNER, decoder_sparse_step=1, experts_implementation=experts
    )
    return transformers.Qwen3MoeForCausalLM(config)


def oss() -> Any:
    config = transformers.GptOssConfig(
        **SIZES, num_local_experts=EXPERTS, experts_implementation="eager", layer_types=["full_attention"] * LAYERS
    )
    return transformers.GptOssForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "loop": lambda: qwen("eager"),
    "grouped": lambda: qwen("grouped_mm"),
    "batched": lambda: qwen("batched_mm"),
    "biases": oss,
}


@pytest.fixture(autouse=True)
def _small_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "headroom", lambda limit: limit // 50)


def made(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def tokens(number: int, length: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(number))


class Streamed:
    """A model streamed through less than half of its weights, beside a plain copy of it."""

    def __init__(self, name: str = "grouped", device: torch.device = CPU, **trial: Any) -> None:
        self.model = made(name)
        self.plain = copy.deepcopy(self.model).to(device)
        self.device = device
        total = sum(parameter.nbytes for parameter in self.plain.parameters())
        settings = Settings(vram=int(total * 0.75), device=device)
        self.session = Session(self.model, None, settings, trial=Trial(poison=True, small_bytes=512, **trial))
        self._loaded = 0
        self.experts = [unit for unit in self.session.units if unit.row_bytes]

    def __enter__(self) -> Streamed:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()

    @torch.no_grad()
    def call(self, number: int, length: int, rows: int = 1) -> int:
        """Both give the same logits; returns the bytes that the streamed one has loaded."""
        given = tokens(number, length, rows).to(self.device)
        assert torch.equal(self.model(given).logits, self.plain(given).logits)
        return self.loaded()

    def loaded(self) -> int:
        self.session.synchronize()
        totals = self.session._parts.ground.recorder.snapshot()
        before, self._loaded = self._loaded, totals.bytes.get(("load", Tag.PARAMETERS), 0)
        return self._loaded - before

    def part(self) -> list[Any]:
        """The copies on the device of which some rows are there."""
        residences = self.session._parts.parameters.residences
        return [r for r in residences if r.stay is not None and r.stay.rows is not None]


@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_are_those_of_the_plain_model(name: str, device: torch.device) -> None:
    with Streamed(name, device) as streamed:
        for number, length in enumerate([20, 1, 1, 4, 1, 30, 1, 8, 1]):
            streamed.call(number, length)
        assert streamed.experts


@pytest.mark.parametrize("name", MODELS)
def test_generated_text_and_its_logits(name: str, device: torch.device) -> None:
    with Streamed(name, device, delay=jitter(device, 0)) as streamed:
        results = [
            model.generate(
                tokens(1, 9).to(device),
                max_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            for model in (streamed.plain, streamed.model)
        ]
        plain, given = results
        assert torch.equal(plain.sequences, given.sequences)
        assert all(torch.equal(*pair) for pair in zip(plain.logits, given.logits, strict=True))


def test_a_call_for_one_token_loads_its_experts() -> None:
    with Streamed() as streamed:
        whole = streamed.call(0, 20)
        few = [streamed.call(number, 1) for number in range(1, 12)]
        assert len(streamed.experts) == LAYERS
        rest = sum(unit.image_bytes for unit in streamed.session.units if not unit.row_bytes)
        assert whole >= sum(unit.image_bytes for unit in streamed.experts)
        assert max(few[4:]) <= LAYERS * CHOSEN * EXPERT_BYTES + rest
        assert min(few[4:]) < whole // 4
        assert streamed.part()


def test_experts_that_are_there_are_not_loaded_again() -> None:
    with Streamed() as streamed:
        for number in range(8):
            streamed.call(number, 1)
        there = {residence.unit.index: set(residence.stay.rows) for residence in streamed.part()}
        again = streamed.call(7, 1)
        kept = sum(
            len(rows) for index, rows in there.items() if index in streamed.session._parts.parameters.residency.kept
        )
        assert kept > 0, "nothing stays"
        assert again < LAYERS * CHOSEN * EXPERT_BYTES


def test_many_tokens_need_all_experts_which_are_prefetched() -> None:
    with Streamed() as streamed:
        for number in range(3):
            streamed.call(number, 1)
        streamed.call(3, 20)
        assert not streamed.part(), "experts that were missing were not added"
        missed = streamed.session.report().misses
        streamed.call(4, 20)
        assert streamed.session.report().misses <= missed + 1
        streamed.call(5, 8)
        streamed.call(6, 9)


def test_user_code_sees_and_writes_every_expert() -> None:
    with Streamed() as streamed:
        for number in range(4):
            streamed.call(number, 1)
        for model in (streamed.plain, streamed.model):
            with torch.no_grad():
                for layer in model.model.layers:
                    layer.mlp.experts.down_proj.mul_(0.5)
                    layer.mlp.experts.gate_up_proj[3] += 1
        for number in range(4):
            streamed.call(number, 1)
        for pair in zip(streamed.plain.parameters(), streamed.model.parameters(), strict=True):
            assert torch.equal(pair[0], torch.as_tensor(pair[1]))


def test_user_code_that_looks_at_all_experts_within_a_call() -> None:
    """A hook of a layer's norm, before the call of its experts, and one of the next layer's, after it."""
    seen: dict[int, list[float]] = {}

    def look(model: Any) -> None:
        def sums(*_: Any) -> None:
            experts = [layer.mlp.experts for layer in model.model.layers]
            seen.setdefault(id(model), []).append(sum(float(e.down_proj.abs().sum()) for e in experts))

        for layer in model.model.layers:
            layer.post_attention_layernorm.register_forward_hook(sums)

    with Streamed() as streamed:
        look(streamed.plain)
        look(streamed.model)
        for number in range(3):
            streamed.call(number, 1)
        assert seen[id(streamed.plain)] == seen[id(streamed.model)]
        assert len(seen[id(streamed.model)]) == 3 * LAYERS


@pytest.mark.parametrize("kind", ["before", "after", "everywhere", "forward"])
def test_user_code_around_the_call_of_experts(kind: str) -> None:
    """It sees device views, and may change which experts are asked for."""
    seen: dict[int, list[float]] = {}

    def attach(model: Any) -> list[Any]:
        handles = []

        def shifted(module: Any, args: Any) -> Any:
            seen.setdefault(id(model), []).append(float(module.down_proj.abs().sum()))
            return args[0], (args[1] + 1) % EXPERTS, args[2]

        def summed(module: Any, *_: Any) -> None:
            if isinstance(module, type(model.model.layers[0].mlp.experts)):
                seen.setdefault(id(model), []).append(float(module.down_proj.abs().sum()))

        for layer in model.model.layers:
            experts = layer.mlp.experts
            if kind == "before":
                handles.append(experts.register_forward_pre_hook(shifted))
            elif kind == "after":
                handles.append(experts.register_forward_hook(summed))
            elif kind == "forward":

                def forward(*args: Any, experts: Any = experts) -> Any:
                    return type(experts).forward(experts, *shifted(experts, args))

                experts.forward = forward
        if kind == "everywhere":
            handles.append(nn.modules.module.register_module_forward_hook(summed))
        return handles

    with Streamed() as streamed:
        outputs = []
        for model in (streamed.plain, streamed.model):
            handles = attach(model)
            with torch.no_grad():
                outputs.append([model(tokens(number, 1)).logits for number in range(3)])
            for handle in handles:
                handle.remove()
        assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))
        assert seen[id(streamed.plain)] == seen[id(streamed.model)]
        assert len(seen[id(streamed.model)]) == 3 * LAYERS


def _of_a_subclass(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    kind = type(model.model.layers[0].mlp.experts)

    class Scaled(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any) -> Any:
            return super().forward(*args) / self.down_proj.abs().mean()

    for layer in model.model.layers:
        layer.mlp.experts.__class__ = Scaled


def _of_a_patched_class(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(model.model.layers[0].mlp.experts)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args: forward(self, *args) / self.down_proj.abs().mean())


def _registered(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def dense(self: Any, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        each = torch.einsum("th,eih->tei", x, self.gate_up_proj)
        gate, up = each.chunk(2, -1)
        out = torch.einsum("tei,ehi->teh", self.act_fn(gate) * up, self.down_proj)
        share = torch.zeros(len(x), self.num_experts).scatter_(1, index, weights.to(x.dtype))
        return torch.einsum("teh,te->th", out, share)

    known = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS
    monkeypatch.setitem(known._global_mapping, "dense", dense)
    model.config._experts_implementation = "dense"


def _with_a_hook_inside(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.act_fn = nn.SiLU()
        experts.act_fn.register_forward_hook(lambda *a, experts=experts: a[2] / experts.down_proj.abs().mean())


@pytest.mark.parametrize("change", [_of_a_subclass, _of_a_patched_class, _registered, _with_a_hook_inside])
def test_experts_that_user_code_computes(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may read every row, though a call names a few."""
    with Streamed() as streamed:
        for number in range(3):
            streamed.call(number, 1)
        assert streamed.part()
        change(streamed.plain, monkeypatch)
        if change is not _of_a_patched_class:  # which is that of both
            change(streamed.model, monkeypatch)
        for number in range(3, 9):
            streamed.call(number, 1 + number % 2)


def test_gradients_need_all_experts() -> None:
    with Streamed() as streamed:
        for number in range(3):
            streamed.call(number, 1)
        for model in (streamed.plain, streamed.model):
            given = tokens(5, 1)
            loss = model(input_ids=given, labels=tokens(6, 1)).logits.square().sum()
            with torch.no_grad():
                model(tokens(7, 1))  # between forward and backward
            loss.backward()
        for name, parameter in streamed.plain.named_parameters():
            other = streamed.model.get_parameter(name).grad
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, torch.as_tensor(other)), name
        streamed.call(8, 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_both_modes_without_gradients(mode: Any) -> None:
    with Streamed() as streamed:
        for number in range(4):
            with mode():
                assert torch.equal(streamed.model(tokens(number, 1)).logits, streamed.plain(tokens(number, 1)).logits)
        assert streamed.part()


def test_an_optimizer_takes_blocks_whole() -> None:
    model = made("grouped")
    optimizer = torch.optim.AdamW(model.parameters())
    with Session(model, optimizer, Settings(vram="4MiB", device="cpu")) as session:
        assert not any(unit.row_bytes for unit in session.units)


class Other(nn.Module):
    """Has what fused experts have, except the promise to read only the rows that are named."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.weight = nn.Parameter(torch.ones(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.sum(0)) * top_k_index.numel()


def test_a_module_that_promises_nothing_is_loaded_whole() -> None:
    model = nn.Sequential(Other(), Other())
    found = partition(model, unit_limit_bytes=1 << 30, only=None, leave=[], by_rows=True)
    assert not any(unit.row_bytes for unit in found.units)


def test_weights_that_two_layers_share() -> None:
    plain = made("grouped")
    layers = plain.model.layers
    layers[2].mlp.experts.down_proj = layers[0].mlp.experts.down_proj
    model = copy.deepcopy(plain)
    total = sum(parameter.nbytes for parameter in plain.parameters())
    settings = Settings(vram=int(total * 0.9), device="cpu")
    with torch.no_grad(), Session(model, None, settings, trial=Trial(poison=True, small_bytes=512)):
        for number in range(6):
            assert torch.equal(model(tokens(number, 1)).logits, plain(tokens(number, 1)).logits)


def test_the_budget_is_kept_and_used_on_a_device_that_counts() -> None:
    def call(number: int, length: int) -> Callable[[Any], torch.Tensor]:
        @torch.no_grad()
        def run(model: Any) -> torch.Tensor:
            return torch.as_tensor(model(tokens(number, length)).logits)

        return run

    lengths = [1, 1, 1, 24, 1, 1, 1, 1, 24, 1, 1]
    calls: list[Any] = [call(number, length) for number, length in enumerate(lengths)]
    total = sum(parameter.nbytes for parameter in made("grouped").parameters())
    seen = Watched(int(total * 0.7), calls, make=lambda: made("grouped"))
    assert max(seen.peaks) <= seen.vram, seen.shown
    assert seen.loaded[7] < EXPERT_BYTES * LAYERS * CHOSEN * 2
    assert min(seen.peaks[4:]) >= 0.7 * seen.vram, seen.shown
    assert "of experts those that it needs" in seen.report
