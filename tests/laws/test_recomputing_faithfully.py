"""What a block does besides computing: whatever it is, a second run of it, or of its parts, must give the same numbers.

Plans are forced: every block is recomputed, with all results that can be put aside, as a whole and in parts."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import nn

from stormtorch.core.sizes import MiB
from stormtorch.offload import OffloadedActivations
from stormtorch.streams import measurement, saving, tape
from stormtorch.streams.activation_plan import OFFLOAD, ActivationPlan, BlockPlan, BlockProfile, Means
from stormtorch.streams.settings import Trial

from .models import one_thread, same  # noqa: F401  # a fixture

WIDTH, STEPS = 16, 5


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.tanh(self.wide(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.narrow(self.middle(x))
        return out


class Block(nn.Module):
    """A norm that leads to a part."""

    def __init__(self, part: Callable[[], nn.Module] = Part) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(WIDTH), part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + cast(torch.Tensor, self.part(self.norm(x)))


class CastByHand(Part):
    """The product of casts is at hand, but backward needs the cast of the weight too."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.wide.weight.double(), self.wide.bias.double()
        return torch.sigmoid(torch.tanh(nn.functional.linear(x.double(), weight, bias))).float()


class CastByAutocast(Part):
    """Twice: the second time autocast finds the weight cast, unless that is the first time in backward."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            once = torch.tanh(self.wide(x))
            return torch.sigmoid(once + torch.tanh(self.wide(x * 2))).float()


class Shared(Block):
    """Autocast casts a weight of both parts for the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Part()
        self.other.wide.weight = cast(Part, self.part).wide.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            x = x + cast(torch.Tensor, self.part(self.norm(x))).float()
            return x + cast(torch.Tensor, self.other(x)).float()


class AutocastAroundThePart(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        with torch.autocast(x.device.type, torch.bfloat16):
            return x + cast(torch.Tensor, self.part(y)).float()


class Leaving(Part):
    """Leaves something behind for whoever looks, after backward as before."""

    seen: torch.Tensor | None = None

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.wide(x))
        self.seen = torch.exp(y.detach())
        return torch.sigmoid(y)


class Raw(Part):
    """A kernel that torch knows nothing of fills memory that torch made."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.wide(x))
        filled = torch.empty(y.shape)
        filled.numpy()[:] = np.cos(y.detach().cpu().numpy())
        return torch.sigmoid(y * filled.to(y.device))


class InPlace(nn.Sequential):
    """Writes into what it is given."""

    def __init__(self) -> None:
        super().__init__(nn.ReLU(inplace=True), nn.Linear(WIDTH, 64), nn.Tanh(), nn.Sigmoid(), nn.Linear(64, WIDTH))


class Borrowed(Block):
    """Calls its children with parameters that are there for that call only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = {name: parameter * 2 for name, parameter in self.norm.named_parameters()}
        part = {name: parameter * 2 for name, parameter in self.part.named_parameters()}
        y = torch.func.functional_call(self.norm, norm, (x,))
        z = cast(torch.Tensor, self.part(self.norm(x)))
        return x + z + cast(torch.Tensor, torch.func.functional_call(self.part, part, (y,)))


class TwoParts(Block):
    """One norm for both, and pieces of what another gives."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.third, self.last = Part(), Part(), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + cast(torch.Tensor, self.part(y)) + cast(torch.Tensor, self.other(y))
        return x + cast(torch.Tensor, self.third(self.last(x)[:, :WIDTH]))


class Dropping(nn.Module):
    """Begins to drop out when nobody expects it any more."""

    rate = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.square() * 0.1 + x
        return torch.dropout(y, self.rate, train=True) if self.rate else y


class LateDropout(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Dropping()  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(super().forward(x), 0.1, train=True)


class GradientInside(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            slope = torch.autograd.grad(torch.sin(y).sum(), y)[0]
        return super().forward(x) * slope


class Inquiring(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = GradientInside(WIDTH)


class RootMeanSquare(Block):
    """As models have it; on the CPU it writes in place, and does not lead to anything."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)  # type: ignore[assignment]


class SelfGated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x.mean(-1, keepdim=True)) * x


class SavesWhatItMakes(Block):
    """What leads to the part saves a result of its own: hooks that keep that as it is keep the graph for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = SelfGated()  # type: ignore[assignment]


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "saves_what_it_makes": SavesWhatItMakes,
    "root_mean_square": RootMeanSquare,
    "cast_by_hand": lambda: Block(CastByHand),
    "cast_by_autocast": lambda: Block(CastByAutocast),
    "shared_cast": Shared,
    "autocast_around_the_part": AutocastAroundThePart,
    "leaving": lambda: Block(Leaving),
    "raw": lambda: Block(Raw),
    "in_place": lambda: Block(InPlace),
    "borrowed": Borrowed,
    "two_parts": TwoParts,
    "late_dropout": LateDropout,
    "gradient_inside": Inquiring,
}


def force(monkeypatch: pytest.MonkeyPatch, *, parts: bool, away: bool) -> list[BlockProfile]:
    """Every block recomputed, with all results; what was known of the blocks."""
    known: list[BlockProfile] = []

    def everything(profiles: list[BlockProfile], _means: Means) -> ActivationPlan:
        known[:] = profiles
        blocks = []
        for profile in profiles:
            names = tuple(profile.parts) if parts else ()
            results = dict.fromkeys(profile.results(names), away)
            plan = BlockPlan(kind="recompute", inputs_away=True, parts=names, led=True, results_away=results)
            blocks.append(plan if profile.repeatable else OFFLOAD)
        return ActivationPlan(blocks=blocks, reason="all", way_bytes=[0] * (len(blocks) + 1))

    monkeypatch.setattr(saving, "choose", everything)
    monkeypatch.setattr(tape, "_LEAST_S", 0.0)
    monkeypatch.setattr(measurement, "_CHEAP", 1e9)
    return known


def opened(model: nn.Module, device: torch.device) -> OffloadedActivations:
    trial = Trial(poison=True, activation_room=0, small_bytes=1)
    return OffloadedActivations(model, "auto", 16 * MiB, "auto", device, trial=trial)


def outcome(model: nn.Module, loss: torch.Tensor) -> Any:
    seen = [module.seen for module in model.modules() if isinstance(module, Leaving)]
    return [loss.detach(), {name: copy.deepcopy(p.grad) for name, p in model.named_parameters()}, copy.deepcopy(seen)]


@pytest.mark.parametrize("away", [True, False], ids=["away", "kept"])
@pytest.mark.parametrize("parts", [True, False], ids=["parts", "whole"])
@pytest.mark.parametrize("name", BLOCKS)
def test_same_gradients(
    name: str, parts: bool, away: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, parts=parts, away=away)
    torch.manual_seed(0)
    plain = nn.Sequential(*(BLOCKS[name]() for _ in range(3))).to(device)
    model = copy.deepcopy(plain)
    with contextlib.closing(opened(model, device)) as activations:
        for step in range(STEPS):
            results = []
            for side, context in ((plain, contextlib.nullcontext()), (model, activations)):
                side.zero_grad()
                for dropping in (module for module in side.modules() if isinstance(module, Dropping)):
                    dropping.rate = 0.3 if step >= 3 else 0.0
                torch.manual_seed(step)
                x = torch.randn(8, WIDTH, requires_grad=True, device=device) * 1
                with context:
                    loss = side(x).square().mean()
                loss.backward(retain_graph=True)
                loss.backward()
                results.append(outcome(side, loss))
            same(results[1], results[0], f"step {step}")


class Watched(torch.autograd.Function):
    """Does nothing; its node is watched."""

    nodes: ClassVar[list[weakref.ref[Any]]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.watched = torch.nn.Identity()
        Watched.nodes.append(weakref.ref(ctx.watched))
        return x * 1

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


@pytest.mark.parametrize("parts", [True, False], ids=["parts", "whole"])
@pytest.mark.parametrize("name", BLOCKS)
def test_nothing_of_a_graph_stays(
    name: str, parts: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = force(monkeypatch, parts=parts, away=True)
    model = nn.Sequential(*(BLOCKS[name]() for _ in range(3))).to(device)
    Watched.nodes.clear()
    with contextlib.closing(opened(model, device)) as activations:
        for _ in range(STEPS):
            x = Watched.apply(torch.randn(8, WIDTH, requires_grad=True, device=device))  # type: ignore[no-untyped-call]
            with activations:
                loss = model(x).square().mean()
            loss.backward()
            del x, loss
            gc.collect()
    assert [node() for node in Watched.nodes] == [None] * STEPS
    if name == "saves_what_it_makes":
        assert known[0].leads == {"part": "norm"}


def sent_bytes(model: nn.Module, activations: OffloadedActivations) -> list[int]:
    """Of each block, what was sent in the last pass; nothing has come back yet."""
    for _ in range(4):
        with activations:
            loss = model(torch.randn(8, WIDTH, requires_grad=True) * 1).square().mean()
        sizes = list(activations.saving._stream._ride.sizes)
        loss.backward()
    return sizes


@pytest.mark.parametrize("name", ["two_parts", "leaving"])
def test_plans_count_what_parts_send(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = force(monkeypatch, parts=True, away=True)
    monkeypatch.setattr(tape, "_MOST", 0)  # no results
    model = nn.Sequential(*(BLOCKS[name]() for _ in range(3)))
    with contextlib.closing(opened(model, torch.device("cpu"))) as activations:
        sizes = sent_bytes(model, activations)
    assert known[0].leads
    assert sum(sizes) == sum(profile.led_bytes for profile in known)
    assert all(profile.led_bytes < profile.between_bytes for profile in known)
