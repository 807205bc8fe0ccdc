"""Law: of two accesses of the same bytes, of which one writes, one comes before the other by what the code asks for.

A GPU's streams then never meet in memory, whichever of them is late (happens_before.py). The numbers are the business
of other laws. test_missing_waits.py shows that a wait that is missing would be found."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stormtorch.session.api import Session
from stormtorch.streams.settings import Settings, Trial

from . import test_inference as inference
from . import test_large_tables as tables
from .counting import Counting
from .happens_before import checking
from .models import LLAMA, RECOMPUTED, Case, adamw, frozen, one_thread, sgd, tight, tokens  # noqa: F401  # a fixture
from .watched import (
    MANY,
    OTHER,
    SHORT,
    SUMS,
    TIED,
    UNTIED,
    Way,
    generated,
    ring,  # noqa: F401  # a fixture
    saved,
    small_scale,  # noqa: F401  # a fixture
    trained,
)

WAYS = [
    Way(share=0.0, look=(1,)),
    Way(poison=True),
    Way(share=1.0, vram="auto"),
    SUMS._replace(share=0.0),
    SUMS._replace(clip="torch"),
    SUMS._replace(share=1.0),
    Way("backward", share=0.0),
    Way("backward", share=1.0, poison=True),
    Way("backward", vram="auto"),
    Way("serial"),
    Way(optimizers=sgd, clip="torch"),
    Way(ahead=True, steps=5),
    Way(ahead=True, steps=5, share=0.0, clip="torch", poison=True, dtype=torch.bfloat16),
    SUMS._replace(ahead=True, share=0.0, steps=4),
    Way(disk=1.0, share=0.0, look=(1,), poison=True),
    SUMS._replace(disk=0.5, clip="torch"),
    Way("backward", disk=0.5, share=0.5),
    Way(disk=1.0, weights=1.0, share=0.0, look=(1,), poison=True),
    SUMS._replace(disk=1.0, weights=0.5, clip="torch"),
    Way("backward", disk=1.0, weights=1.0, share=0.0),
]
CASES = [LLAMA, RECOMPUTED, *(OTHER[name] for name in ("tied", "moe", "lora", "conv", "lstm"))]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.daily(
    "0.0-(1,)",
    "1.0-2-session-2",
    "2-torch-2-0.5",
    "backward-1.0-True",
    "backward-auto",
    "serial",
    "torch-sgd",
    "True-5",
    "0.0-torch-True-True-torch.bfloat16-5",
    "0.0-2-session-True-4",
    "0.0-True-(1,)-1.0",
    "backward-0.5",
)
def test_each_way_to_train(way: Way) -> None:
    trained(SHORT, way).check()


@pytest.mark.parametrize("case", [RECOMPUTED, *(OTHER[name] for name in ("moe", "lora", "conv"))], ids=lambda c: c.name)
@pytest.mark.daily("llama-recomputed", "moe", "lora")
def test_some_kinds_of_models(case: Case) -> None:
    trained(case, Way(steps=2)).check()


@pytest.mark.wide
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_kind_of_model_in_each_way(case: Case, way: Way) -> None:
    trained(case, way).check()


@pytest.mark.parametrize("activations", ["offload", "recompute", "auto"])
@pytest.mark.parametrize("case", [SHORT, OTHER["conv"]], ids=lambda case: case.name)
def test_activations_that_travel(case: Case, activations: str) -> None:
    trained(case, Way(activations=activations)).check()


@pytest.mark.parametrize("way", [Way(), Way("backward"), SUMS], ids=str)
@pytest.mark.parametrize("kept", [2, 99])
def test_states_kept_on_the_device(way: Way, kept: int) -> None:
    trained(SHORT, way._replace(kept=kept)).check()


@pytest.mark.parametrize(
    "way", [SUMS._replace(share=0.0), SUMS, Way("backward", share=0.0), Way(dtype=torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("case", [UNTIED, TIED], ids=lambda case: case.name)
def test_gradients_that_go_home_in_parts(case: Case, way: Way) -> None:
    trained(case, way._replace(vram=tables.FLOOR * way.dtype.itemsize // 4)).check()


@pytest.mark.usefixtures("ring")
def test_gradients_in_a_ring() -> None:
    trained(MANY, Way("backward", share=0.0)).check()


def test_training_in_bf16() -> None:
    trained(SHORT, SUMS._replace(dtype=torch.bfloat16)).check()


@pytest.mark.daily("ram", "forward-disk")
@pytest.mark.parametrize("weights", [0.0, 1.0], ids=["ram", "disk"])
@pytest.mark.parametrize("step", ["forward", "backward", "serial"])
def test_user_code_between_steps(step: str, weights: float, tmp_path: Path) -> None:
    model = SHORT.build()
    optimizer, parameters = adamw(model), list(model.parameters())
    trial = Trial(device_share=0.5, weights_part=weights)
    settings = Settings(vram=tight(model), device="cpu", step=step, disk=tmp_path if weights else None)
    with checking() as checker, Session(model, optimizer, settings, trial=trial):
        for number in range(4):
            SHORT.loss(model, tokens(number)).backward()
            if step != "backward":
                _meddle_with_gradients(parameters, number)
            optimizer.step()
            with torch.no_grad():
                for parameter in parameters[number::5]:
                    parameter.mul_(0.99)
                parameters[number].data.add_(0.01)
            for state in list(optimizer.state.values())[number::5]:
                state["exp_avg"].mul_(0.5)
            if number == 1:
                frozen(model.state_dict())
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad(set_to_none=number != 2 or step == "backward")
    checker.check()


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.linear(self.norm(x)))


class _Checkpointed(nn.Module):
    """Its block is checkpointed, and forms one unit with the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block()])
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.norm(x + checkpoint(self.blocks[0], x, use_reentrant=False)))


def test_gradients_that_torch_is_asked_for_of_code_that_runs_again(device: torch.device) -> None:
    """Checkpointed code that runs again computes with device views, in `torch.autograd.grad` too."""
    found = []
    for streamed in (True, False):
        torch.manual_seed(0)
        model = _Checkpointed().to("cpu" if streamed else device)
        # torch's fused AdamW rounds otherwise on a GPU, where plain PyTorch trains.
        optimizer = adamw(model) if device.type == "cpu" else sgd(model)
        parameters = list(model.parameters())
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(device)
        settings = Settings(vram="8MiB", device=device)
        with (
            checking() if streamed and device.type == "cpu" else nullcontext() as checker,
            Session(model, optimizer, settings, trial=Trial(device_share=0.0)) if streamed else nullcontext(),
        ):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append([g.cpu() for g in torch.autograd.grad(model(x).square().sum(), parameters)])
            found[-1] += [g.cpu() for g in torch.autograd.grad(outputs=model(x).sum(), inputs=parameters[0])]
        if checker is not None:
            checker.check()
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def _meddle_with_gradients(parameters: list[nn.Parameter], number: int) -> None:
    for parameter in parameters[number::3]:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)
    first, second = parameters[number : number + 2]
    assert first.grad is not None
    first.grad, second.grad = first.grad.clone(), None


def test_a_save_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "save", monkeypatch).check()
    saved(tmp_path / "another", monkeypatch, states=tmp_path, held_s=0.5).check()


@pytest.mark.usefixtures("small_scale")
def test_inference_with_a_pool_that_grows_and_shrinks() -> None:
    model = inference.made()
    total = sum(parameter.nbytes for parameter in model.parameters())
    settings = Settings(vram=int(total * 0.6), device="cpu")
    sizes = set[int]()
    with (
        Counting() as meter,
        checking() as checker,
        torch.no_grad(),
        Session(model, None, settings, trial=Trial(meter=meter)) as session,
    ):
        for number in range(10):
            model(inference.tokens(number, 4 + 20 * (number % 3)), caching=number > 4)
            sizes.add(session._parts.ground.pool.capacity_bytes)
    checker.check()
    assert len(sizes) > 2


@pytest.mark.usefixtures("small_scale")
@pytest.mark.parametrize("name", ["grouped", *(pytest.param(n, marks=pytest.mark.wide) for n in ("loop", "batched"))])
def test_experts_that_come_by_rows(name: str) -> None:
    generated(name).check()
