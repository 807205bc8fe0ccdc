"""Law: inside of `no_grad`, `inference_mode` and checkpoints, modules see weights as plain PyTorch shows them.

Torch chooses kernels by ``weight.requires_grad``, also where it records no graph: a weight that shows another value of
it gives other bits for a strided input."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .models import adamw, frozen, same, stream

W = 48
Rows = Callable[[], torch.Tensor]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(W, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.inner(x, x, x)[0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(W, W, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.inner(x)[0])


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(W, W, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.inner(x.transpose(1, 2)).transpose(1, 2))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, W)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(x + functional.linear(self.table((x[..., 0] > 0).long()), self.table.weight[:1]))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(W, W),
    "without bias": lambda: nn.Linear(W, W, bias=False),
    "norm": lambda: nn.LayerNorm(W),
    "attention": Attention,
    "recurrent": Recurrent,
    "convolution": Convolution,
    "table": Table,
}
INPUTS: dict[str, Rows] = {
    "whole": lambda: torch.randn(2, 4, W),
    "one of many rows": lambda: torch.randn(2, 4, W)[:, :1],
    "some of many columns": lambda: torch.randn(2, 4, 2 * W)[..., ::2],
    "transposed": lambda: torch.randn(4, 2, W).transpose(0, 1),
    "expanded": lambda: torch.randn(1, 4, W).expand(3, 4, W),
}


def in_no_grad(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(x)


def in_inference_mode(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.inference_mode():
        return model(x)


def with_grad_inside(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad(), torch.enable_grad():
        answer = model(x)
    answer.square().sum().backward()
    return answer


def reentrant(model: nn.Module, x: torch.Tensor) -> Any:
    x = x.requires_grad_()
    for block in model:  # type: ignore[attr-defined]
        x = checkpoint(block, x, use_reentrant=True)
    x.square().sum().backward()  # a block each: a checkpoint over all of them would hold all of their weights
    return x


def given_other_weights(model: nn.Module, x: torch.Tensor) -> Any:
    others = {name: p.detach() + 1 for name, p in model.named_parameters() if name.startswith("0.")}
    with torch.no_grad():
        return functional_call(model, others, (x,))


CONTEXTS = [in_no_grad, in_inference_mode, with_grad_inside, reentrant, given_other_weights]


def grads(model: nn.Module) -> list[Any]:
    return [frozen(parameter.grad) for parameter in model.parameters()]


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_answer_alike_in_every_mode(layer: str) -> None:
    """With weights that come and go, and with all of them on the device."""
    for vram, frozen_too in (("tight", False), ("1GiB", True)):
        torch.manual_seed(0)
        plain = nn.Sequential(*(LAYERS[layer]() for _ in range(4)))
        if frozen_too:
            for parameter in plain[1].parameters():
                parameter.requires_grad_(False)
        model = copy.deepcopy(plain)
        with stream(model, adamw(model), vram=vram, seed=0):
            for context in CONTEXTS:
                for kind, make in INPUTS.items():
                    torch.manual_seed(1)
                    x = make()
                    results = []
                    for side in (plain, model):
                        side.zero_grad()
                        results.append((frozen(context(side, x.detach())), grads(side)))
                    same(results[1], results[0], f"{layer}, {context.__name__}, {kind}")


class Looking(nn.Module):
    """Notes what a forward sees of its own weights, and of another module's."""

    def __init__(self, seen: list[Any], other: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(W, W)
        self.inner.bias.requires_grad_(False)
        self.seen, self.other = seen, [other]  # a list: not a child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.look("at first")
        with torch.enable_grad():
            self.look("with grad")
        with torch.no_grad():
            self.look("without")
        with torch.inference_mode():
            self.look("in inference mode")
        answer = self.inner(x)
        self.seen.append(("answer", answer.requires_grad, answer.is_inference()))
        return torch.as_tensor(answer)

    def look(self, when: str) -> None:
        for module in (self.inner, self.other[0]):
            for name, weight in module.named_parameters() if module is not None else ():
                seen = weight if module is self.inner else getattr(module, name)
                self.seen.append((when, name, seen.requires_grad, seen.is_inference()))
        for name in ("weight", "bias"):
            inner = getattr(self.inner, name)
            made = (inner.detach(), inner.view(-1), inner[:1], inner * 1, inner.clone())
            self.seen.append((when, name, inner.requires_grad, inner.is_inference()))
            self.seen.append([(tensor.requires_grad, tensor.is_inference()) for tensor in made])


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vram", ["tight", "1GiB"])
def test_a_forward_sees_what_it_sees_in_plain_pytorch(mode: str, vram: str) -> None:
    lists: list[list[Any]] = []
    models = []
    for _ in range(2):
        seen: list[Any] = []
        first = Looking(seen)
        models.append(nn.Sequential(first, Looking(seen, first.inner), nn.Linear(W, W), nn.Linear(W, W)))
        lists.append(seen)
    plain, model = models
    model.load_state_dict(plain.state_dict())
    with stream(model, adamw(model), vram=vram, seed=0):
        for change in (None, False, True):  # frozen and thawed between passes
            for side in models:
                if change is not None:
                    side.get_parameter("0.inner.weight").requires_grad_(change)
                for _ in range(2):
                    with MODES[mode]():
                        side(torch.ones(2, W))
            assert lists[1] == lists[0], f"after requires_grad_({change})"
    assert any(entry[2] for entry in lists[0] if entry[0] == "at first")


class Gradient(nn.Module):
    """A forward that takes a gradient of its own, as models of forces do, whatever the mode around it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(W, W), nn.Linear(W, 8)
        self.energies: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            x = x.clone().requires_grad_()
            energy = self.down(torch.tanh(self.up(x))).square().sum()
            self.energies.append(energy)
            return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vram", ["tight", "1GiB"])
@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_a_graph_inside_reaches_the_weights(mode: str, vram: str, activations: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Gradient(), Gradient(), nn.Linear(W, W), nn.Linear(W, W))
    model = copy.deepcopy(plain)
    x = torch.randn(2, 4, W)[:, :1]
    with stream(model, adamw(model), vram=vram, seed=0, activations=activations):
        for _ in range(3):
            results = []
            for side in (plain, model):
                side.zero_grad()
                with MODES[mode]():
                    answer = side(x)
                first, second = side[0], side[1]
                assert isinstance(first, Gradient)
                assert isinstance(second, Gradient)
                energy = first.energies.pop() + second.energies.pop()
                energy.backward()
                results.append((frozen(answer), frozen(energy), grads(side)))
            same(results[1], results[0], f"forces in {mode}")
    assert results[0][2][0] is not None


def test_reentrant_checkpoints_train_alike() -> None:
    """Blocks of their own, updated during backward: nothing waits for a pass that has made no graph."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(W, W, bias=False) for _ in range(4)))
    model = copy.deepcopy(plain)
    sides = [(plain, adamw(plain)), (model, adamw(model))]
    with stream(model, sides[1][1], vram="tight", step="backward", seed=0) as session:
        for step in range(4):
            answers = []
            for side, optimizer in sides:
                torch.manual_seed(step)
                answers.append(frozen(reentrant(side, torch.randn(2, 4, W)[:, :1])))
                if side is model:
                    homes = session._parts.schedule.gradients.homes
                    assert all(home.consumed for home in homes), "a unit was left for step()"
                optimizer.step()
                optimizer.zero_grad()
            same(answers[1], answers[0], f"answer of step {step}")
        same(frozen(model.state_dict()), frozen(plain.state_dict()), "weights")
