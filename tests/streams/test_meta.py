"""Models from the meta device: streamed first, filled afterwards. STORM does not compute with what was not filled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stormtorch as storm
from stormtorch.checkpoint import load_weights
from stormtorch.core.errors import SettingError
from stormtorch.streams.home.parameter import plain

WIDTH = 8


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return torch.as_tensor(self.head(x))


TOKENS = torch.arange(6).view(1, 6)
NAMES = [name for name, _ in Net().named_parameters()]


def empty(tied: bool = False) -> Net:
    with torch.device("meta"):
        return Net(tied)


def zeros() -> dict[str, torch.Tensor]:
    """Values that memory cannot tell from none at all."""
    return {name: torch.zeros_like(tensor) for name, tensor in Net().state_dict().items()}


def streamed(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **settings: Any) -> storm.Session:
    return storm.stream(model, optimizer, vram="1MiB", device="cpu", **settings)


@torch.no_grad()
def by_item(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter[...] = 0


@torch.no_grad()
def by_foreach(model: nn.Module) -> None:
    torch._foreach_zero_(list(model.parameters()))


@torch.no_grad()
def by_view(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.view(-1).copy_(torch.zeros(parameter.numel()))


def by_init(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.zeros_(parameter)


def by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.zero_()


def by_new_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = torch.zeros(parameter.shape)


def by_numpy(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.detach().numpy()[...] = 0


def by_vector(model: nn.Module) -> None:
    count = sum(parameter.numel() for parameter in model.parameters())
    nn.utils.vector_to_parameters(torch.zeros(count), model.parameters())


def by_state_dict(model: nn.Module) -> None:
    model.load_state_dict(zeros())


def by_assigning(model: nn.Module) -> None:
    model.load_state_dict(zeros(), assign=True)


WAYS = [by_item, by_foreach, by_view, by_init, by_data, by_new_data, by_numpy, by_vector, by_state_dict, by_assigning]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_whoever_writes_is_believed_even_if_it_is_zeros(way: Callable[[nn.Module], None]) -> None:
    model = empty()
    with streamed(model):
        way(model)
        with torch.no_grad():
            assert not model(TOKENS).any()


@pytest.mark.parametrize("values", ["zeros", "others"])
def test_files_fill_it(tmp_path: Path, values: str) -> None:
    whole = Net()
    if values == "zeros":
        whole.load_state_dict(zeros())
    with streamed(whole, torch.optim.AdamW(whole.parameters())) as session, torch.no_grad():
        expected = whole(TOKENS)
        session.save(tmp_path / "one")
    for load in (lambda model, _: load_weights(model, tmp_path / "one"), lambda _, s: s.load(tmp_path / "one")):
        model = empty()
        with streamed(model, torch.optim.AdamW(model.parameters())) as session, torch.no_grad():
            load(model, session)
            assert torch.equal(model(TOKENS), expected)
            assert session._parts.schedule.unwritten is None  # the session does not ask again


def test_a_way_to_the_memory_that_nobody_sees() -> None:
    """The values there then show that user code wrote them."""
    model = empty()
    with streamed(model), torch.no_grad():
        for parameter in model.parameters():
            torch.Tensor(parameter).fill_(0.5)
        model(TOKENS)


@pytest.mark.parametrize("training", [False, True])
def test_what_nobody_has_written_is_refused(training: bool) -> None:
    model = empty()
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)  # frozen ones count too
    optimizer = torch.optim.AdamW(model.parameters()) if training else None
    with streamed(model, optimizer):
        str(model), model.head.weight.shape, list(model.named_parameters())  # looking changes nothing
        for _ in range(2):
            with pytest.raises(
                storm.StormError, match=f"'{NAMES[0]}' and {len(NAMES) - 1} more have no values"
            ) as told:
                model(TOKENS)
        assert "load_weights(model, folder)" in str(told.value)
        assert "\n" not in str(told.value)
        by_init(model)
        model(TOKENS).sum().backward()


def test_only_what_is_missing_is_named() -> None:
    model = empty()
    with streamed(model):
        model.load_state_dict({n: v for n, v in zeros().items() if n not in ("blocks.1.bias",)}, strict=False)
        with pytest.raises(storm.StormError, match=r"'blocks\.1\.bias' has no values"):
            model(TOKENS)
        with torch.no_grad():  # a part that has all of its values runs by itself
            assert not model.blocks[0](torch.ones(1, WIDTH)).any()
        with pytest.raises(storm.StormError, match=r"'blocks\.1\.bias' has no values"):
            model(TOKENS)
        nn.init.zeros_(model.get_parameter("blocks.1.bias"))
        model(TOKENS)


def test_tied_parameters_count_once() -> None:
    model = empty(tied=True)
    with streamed(model):
        with pytest.raises(storm.StormError, match=f"'embed.weight' and {len(NAMES) - 2} more have"):
            model(TOKENS)
        by_state_dict(model)
        model(TOKENS)


def test_functional_call_needs_none_of_them() -> None:
    model, whole = empty(), Net()
    with streamed(model), torch.no_grad():
        values: dict[str, torch.Tensor] = dict(whole.named_parameters())
        assert torch.equal(torch.func.functional_call(model, values, (TOKENS,)), whole(TOKENS))
        with pytest.raises(storm.StormError, match="no values"):
            model(TOKENS)


@pytest.mark.parametrize("way", [by_data, by_state_dict, by_item])
def test_what_is_left_on_the_device_has_memory_of_its_own(way: Callable[[nn.Module], None]) -> None:
    model = empty()
    with streamed(model, leave=["blocks.1"]), torch.no_grad():
        for module in (model.embed, model.blocks[0], model.blocks[2], model.head):
            by_init(module)
        with pytest.raises(storm.StormError, match=r"'blocks\.1\.weight' and 1 more have no values"):
            model(TOKENS)
        way(model)
        assert not model(TOKENS).any()


def test_adapters_alone_do_not_fill_the_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted(model: nn.Module) -> Any:
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0", "1", "2"]))

    whole = adapted(Net())
    with streamed(whole) as session:
        session.save(tmp_path / "one")
    model = adapted(empty())
    with streamed(model) as session:
        session.load(tmp_path / "one")
        with pytest.raises(storm.StormError, match=r"base_model\.model\.embed\.weight' and \d+ more") as told:
            model(TOKENS)
        assert "lora" not in str(told.value)
        base = [name for name, _ in model.named_parameters() if "lora" not in name]
        assert f"and {len(base) - 1} more" in str(told.value)


def test_a_refusal_leaves_it_on_the_meta_device() -> None:
    """Or the second try would stream zeros."""
    model = empty(tied=True)
    optimizer = torch.optim.AdamW(model.parameters())
    before = list(model.parameters())
    for settings in ({"vram": "1KiB"}, {"ram": "1KiB"}, {"leave": ["absent"]}):
        with pytest.raises(storm.StormError):
            storm.stream(model, optimizer, **{"device": "cpu", **settings})  # type: ignore[arg-type]
        assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
        assert all(now is then for now, then in zip(optimizer.param_groups[0]["params"], before, strict=True))
        assert model.head.weight is model.embed.weight
    with streamed(model, optimizer):
        with pytest.raises(storm.StormError, match="no values"):
            model(TOKENS)
        model.load_state_dict(Net(tied=True).state_dict())
        model(TOKENS).sum().backward()
        optimizer.step()


def test_buffers_must_be_real() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(storm.SettingError, match=r"1\.running_mean, .*init_empty_weights\(include_buffers=False\)"):
        streamed(model)
    for name, values in nn.BatchNorm1d(4).named_buffers():
        setattr(model[1], name, values)  # the advice, followed
    streamed(model).close()


def test_the_advice_for_buffers_works() -> None:
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights(include_buffers=False):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with streamed(model):
        by_init(model)
        assert torch.isfinite(model(torch.randn(3, 4))).all()


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_activations_of_a_model_without_memory(device: str) -> None:
    with pytest.raises(storm.SettingError, match=r"model is on the meta device: 'embed\.weight' and .* weights first"):
        storm.offload_activations(empty(), device=device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_that_came_unseen_are_what_is_trained(dtype: torch.dtype) -> None:
    """As a broadcast or a loader of one's own writes them: masters were made before they came."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    values = torch.randn(WIDTH, WIDTH).to(dtype)
    with storm.stream(model, optimizer, vram="1GiB", device="cpu"):
        for parameter in model.parameters():
            plain(parameter).detach().copy_(values)
        model(torch.ones(2, WIDTH, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        for parameter in model.parameters():
            torch.testing.assert_close(parameter.detach(), values, rtol=1e-3, atol=1e-4)


def test_a_shape_that_is_not_known_yet() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, device="meta"), nn.LazyLinear(WIDTH))
    with pytest.raises(SettingError, match=r"The parameter '1.weight' has no shape yet"):
        storm.stream(model, vram="1GiB", device="cpu")
    assert model[0].weight.is_meta
