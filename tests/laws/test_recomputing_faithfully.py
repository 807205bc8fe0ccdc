"""What a block does besides computing: whatever it is, a second run of it must give the same numbers."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from stormtorch.core.errors import StaleGraph
from stormtorch.core.sizes import MiB
from stormtorch.session.offload import OffloadedActivations
from stormtorch.streams.activations.plans.profiles import ROUNDS
from stormtorch.streams.settings import Trial

from .models import Case, Pair, one_thread, same, sgd  # noqa: F401  # a fixture

WIDTH, STEPS = 16, 6


@pytest.fixture(autouse=True, params=[False, True], ids=["", "settled"])
def settled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether blocks count as settled (recompute.py) as soon as they were measured."""
    if request.param:
        monkeypatch.setattr("stormtorch.streams.activations.runner.SETTLED_AT", ROUNDS)
    return bool(request.param)


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
    """Leaves an object that user code can read, after backward as before."""

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


class Timed(nn.Module):
    """Counts its steps, and behaves differently late, when STORM does not expect it any more."""

    step = 0

    @property
    def is_late(self) -> bool:
        return self.step >= 3


class Dropping(Timed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.square() * 0.1 + x
        return torch.dropout(y, 0.3, train=True) if self.is_late else y


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


class NotPlain(Part):
    """Computes with a tensor that is not strided memory."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(super().middle(x).to_sparse().to_dense())


class SelfGated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x.mean(-1, keepdim=True)) * x


class SavesWhatItMakes(Block):
    """What leads to the part saves a result of its own: hooks that keep that as it is keep the graph for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = SelfGated()  # type: ignore[assignment]


class Looking(Part):
    """Looks at numbers with no operation that torch would show anybody."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        y = self.wide(x)
        return torch.sigmoid(torch.tanh(y) * torch.from_numpy(np.cos(y.detach().cpu().numpy())).to(y.device))


class Experts(Part):
    """Which rows go where is decided by numbers that are lists then."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, 64) for _ in range(3))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        expert = self.router(x).argmax(-1)
        order = expert.argsort(stable=True)
        pieces = x[order].split(torch.bincount(expert, minlength=3).tolist())
        rows = [torch.tanh(layer(piece)) for layer, piece in zip(self.experts, pieces, strict=True)]
        return torch.sigmoid(x.new_zeros(len(x), 64).index_copy(0, order, torch.cat(rows)))


class Crossing(Part):
    """The same operations for both ways, on other operands."""

    def __init__(self, *, crosses: bool) -> None:
        super().__init__()
        self.second, self.crosses = nn.Linear(WIDTH, 64), crosses

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.wide(x), self.second(x)
        if self.crosses:
            one, two = two, one
        return torch.sigmoid(torch.sin(one) + 0.5 * two)  # backward needs what sin is given, and not the other


class Tabled(Part):
    """Makes a table when the length is another one, which backward then finds made."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.register_buffer("positions", torch.linspace(0, 1, 8 * WIDTH).view(8, WIDTH))
        self.register_buffer("spread", torch.linspace(-1, 1, 64 * WIDTH).view(64, WIDTH))
        self.register_buffer("shift", torch.zeros(64))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        if self.length != len(x):
            self.length = len(x)
            self.table = nn.functional.linear(self.positions[: len(x)], self.spread, self.shift)  # type: ignore[arg-type,index]
        return torch.sigmoid(torch.tanh(self.wide(x)) + self.table)


class Layerdrop(Part, Timed):
    """By random numbers of Python's."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        scale = 2.0 if self.is_late and random.random() < 0.5 else 0.5
        return torch.sigmoid(torch.tanh(self.wide(x) * scale))


class Attend(torch.autograd.Function):
    """One operation that drops out by itself, as attention does on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rate: float) -> torch.Tensor:
        y: torch.Tensor = torch.ops.storm_laws.attend(x, rate)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return gradients[0] * x.cos() * (y != 0), None


LIBRARY = torch.library.Library("storm_laws", "DEF")
LIBRARY.define("attend(Tensor x, float dropout_p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
LIBRARY.impl("attend", lambda x, p: x.sin() * (torch.rand_like(x) > p) if p else x.sin(), "CompositeExplicitAutograd")


class Attending(Part, Timed):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        rate = 0.3 if self.is_late else 0.0
        y: torch.Tensor = Attend.apply(self.wide(x), rate)  # type: ignore[no-untyped-call]
        return torch.sigmoid(torch.dropout(y, 0.2, train=True))


class Sparing(nn.LayerNorm):
    def forward(self, x: torch.Tensor | None) -> torch.Tensor | None:  # type: ignore[override]
        return None if x is None else super().forward(x)


class LeadsToNothing(Block, Timed):
    """What leads to a part is also called with nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Sparing(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_late:
            assert self.norm(None) is None
        return super().forward(x)


class Statistics(Part):
    """Has buffers, which forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(64, affine=False)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(cast(torch.Tensor, self.batch_norm(torch.tanh(self.wide(x)))))


class Unnormed(Statistics):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.Identity()  # type: ignore[assignment]


class CallsABlock(Part):
    """... which is one of the model's, and not its own."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.others = [block]

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.sin(self.wide(cast(torch.Tensor, self.others[0](x)))))


class Relu(Part):
    """Does not save what it is given."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return super().middle(torch.relu(x))


class AddsInPlace(nn.Module):
    """Writes over what a block was given, which that does not mind."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Relu() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x += cast(torch.Tensor, block(x))
        return x


class CountsItsCalls(Part):
    """Computes with how often it was called."""

    calls = 0

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().middle(x * (1 + 0.1 * self.calls))


class Remembers(Part):
    """Computes with what it has seen in the call before."""

    memory: torch.Tensor | None = None

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        before = x.detach().mean(0) if self.memory is None else self.memory
        self.memory = 0.5 * before + 0.5 * x.detach().mean(0)
        return super().middle(x + before)


class RemembersInPlace(Part):
    """The same, in a tensor that is no buffer, and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.seen = torch.zeros(WIDTH), list[float]()

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.memory = self.memory.to(x.device)
        y = super().middle(x + self.memory + 0.01 * len(self.seen))
        self.memory.lerp_(x.detach().mean(0), 0.5)
        self.seen.append(1.0)
        return y


class OwnGenerator(Part):
    """Draws random numbers that are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return super().middle(x + torch.rand(WIDTH, generator=self.generator).to(x.device))


class NumpyNoise(Part, Timed):
    """Begins late to draw random numbers of numpy's."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        scale = float(np.random.rand()) if self.is_late else 1.0
        return super().middle(x * scale)


class GrowsItsTable(Part, Timed):
    """Replaces its table by a longer one when it needs more of it, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(1))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_late and self.get_buffer("table").numel() == 1:
            self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH, device=x.device))
        return super().middle(x * self.get_buffer("table"))


class RewiredLater(Crossing, Timed):
    """The same operations, with other operands from some step on."""

    def __init__(self) -> None:
        super().__init__(crosses=False)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.crosses = self.is_late
        return super().middle(x)


class BranchesOnItsInput(Part):
    """Which result goes where depends on the numbers, and changes from step to step."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        one, two = torch.sin(self.wide(x)), torch.cos(self.wide(x))
        if float(x.detach().sum()) > 0:
            one, two = two, one
        return torch.sigmoid(one * 0.3 + two.square())


def calling_a_block() -> nn.Module:
    block = Block()
    return nn.Sequential(block, *(Block(lambda: CallsABlock(block)) for _ in range(3)))


def of_each(*makes: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(make() for make in makes))


class FreesByData(Part):
    """Frees a result that autograd has saved, as pipelines do."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.wide(x))
        z = y.sum(-1, keepdim=True) + torch.sigmoid(self.wide(x))
        y.data = torch.empty(1, device=x.device)
        return z


def of_parts(*makes: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(Block(make) for make in makes))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "saves_what_it_makes": of_each(*[SavesWhatItMakes] * 3),
    "root_mean_square": of_each(*[RootMeanSquare] * 3),
    "cast_by_hand": of_parts(*[CastByHand] * 3),
    "cast_by_autocast": of_parts(*[CastByAutocast] * 3),
    "shared_cast": of_each(*[Shared] * 3),
    "autocast_around_the_part": of_each(*[AutocastAroundThePart] * 3),
    "leaving": of_parts(*[Leaving] * 3),
    "raw": of_parts(*[Raw] * 3),
    "in_place": of_parts(*[InPlace] * 3),
    "frees_by_data": of_parts(*[FreesByData] * 3),
    "borrowed": of_each(*[Borrowed] * 3),
    "two_parts": of_each(*[TwoParts] * 3),
    "late_dropout": of_each(*[LateDropout] * 3),
    "gradient_inside": of_each(*[Inquiring] * 3),
    "looking": of_parts(*[Looking] * 3),
    "experts": of_parts(*[Experts] * 3),
    "crossing": of_parts(*(functools.partial(Crossing, crosses=crosses) for crosses in (False, True, False))),
    "tabled": of_parts(*[Tabled] * 3),
    "layerdrop": of_parts(*[Layerdrop] * 3),
    "attending": of_parts(*[Attending] * 3),
    "leads_to_nothing": of_each(*[LeadsToNothing] * 3),
    "statistics_of_one": of_parts(Unnormed, Statistics, Unnormed),
    "calls_a_block": calling_a_block,
    "adds_in_place": AddsInPlace,
    "not_plain": of_parts(*[NotPlain] * 3),
    "counts_its_calls": of_parts(*[CountsItsCalls] * 3),
    "remembers": of_parts(*[Remembers] * 3),
    "remembers_in_place": of_parts(*[RemembersInPlace] * 3),
    "own_generator": of_parts(*[OwnGenerator] * 3),
    "numpy_noise": of_parts(*[NumpyNoise] * 3),
    "grows_its_table": of_parts(*[GrowsItsTable] * 3),
    "rewired_later": of_parts(*[RewiredLater] * 3),
    "branches_on_its_input": of_parts(*[BranchesOnItsInput] * 3),
}


# Inputs of blocks leave for RAM, or stay; or all is offloaded, into RAM that is there or not.
WAYS = {"away": ("recompute", 0, "auto"), "kept": ("recompute", 10**9, "auto"), "auto": ("auto", 0, "auto")}


def opened(model: nn.Module, device: torch.device, way: str = "away") -> OffloadedActivations:
    mode, room, ram = WAYS[way]
    trial = Trial(poison=True, activation_room=room, small_bytes=1)
    return OffloadedActivations(model, mode, 16 * MiB, ram, device, trial=trial)


def outcome(model: nn.Module, loss: torch.Tensor) -> Any:
    seen = [module.seen for module in model.modules() if isinstance(module, Leaving)]
    grads = {name: copy.deepcopy(p.grad) for name, p in model.named_parameters()}
    return [loss.detach(), grads, copy.deepcopy(seen), copy.deepcopy(dict(model.named_buffers()))]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_same_gradients(name: str, way: str, device: torch.device) -> None:
    torch.manual_seed(0)
    plain = MODELS[name]().to(device)
    model = copy.deepcopy(plain)
    with contextlib.closing(opened(model, device, way)) as activations:
        for step in range(STEPS):
            results = []
            for side, context in ((plain, contextlib.nullcontext()), (model, activations)):
                side.zero_grad()
                for timed in (module for module in side.modules() if isinstance(module, Timed)):
                    timed.step = step
                torch.manual_seed(step)
                random.seed(step)
                np.random.seed(step)
                rows = 5 if step == STEPS - 2 else 8
                x = torch.randn(rows, WIDTH, requires_grad=True, device=device) * 1
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


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.daily(
    "leaving",
    "frees_by_data",
    "two_parts",
    "gradient_inside",
    "remembers",
    "grows_its_table",
    "experts",
    "cast_by_autocast",
    "saves_what_it_makes",
    "borrowed",
    "late_dropout",
    "crossing",
    "layerdrop",
    "leads_to_nothing",
    "own_generator",
    "rewired_later",
    "in_place",
)
def test_nothing_of_a_graph_stays(name: str, device: torch.device) -> None:
    model = MODELS[name]().to(device)
    Watched.nodes.clear()
    with contextlib.closing(opened(model, device)) as activations:
        for _ in range(STEPS):
            x = Watched.apply(torch.randn(8, WIDTH, requires_grad=True, device=device))  # type: ignore[no-untyped-call]
            with activations:
                loss = model(x).square().mean()
            loss.backward()
            del x, loss
            if device.type == "cuda":
                torch.cuda.synchronize()  # or there may be no plan yet when the last step has been enqueued
    gc.collect()
    assert [node() for node in Watched.nodes] == [None] * STEPS


class Attention(Part):
    """Takes the kernel that it may, and makes a tensor of the dtype that is the default."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.view(1, -1, 2, WIDTH // 2).transpose(1, 2) * scale for scale in (1, 2, 3))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return torch.sigmoid(super().middle(y) + torch.full((64,), 1 / 3, device=x.device).float())


@contextlib.contextmanager
def other_surroundings() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # torch's own, whatever the flag
def test_a_forward_in_surroundings_of_its_own(device: torch.device) -> None:
    """Backward comes when they are gone."""
    plain = of_parts(*[Attention] * 3)().to(device)
    model = copy.deepcopy(plain)
    with contextlib.closing(opened(model, device)) as activations:
        for step in range(STEPS):
            for side, context in ((plain, contextlib.nullcontext()), (model, activations)):
                torch.manual_seed(step)
                x = torch.randn(8, WIDTH, requires_grad=True, device=device) * 1
                with context, other_surroundings():
                    loss = side(x).square().mean()
                loss.backward()
            same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], f"step {step}")
    assert torch.get_default_dtype() == torch.float32
    assert torch.backends.cuda.flash_sdp_enabled()


class NowAndThen(Part, Timed):
    """Does not change its buffer while it is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        y = super().middle(x)
        if self.is_late:
            self.mean.lerp_(y.detach().mean(0), 0.1)  # type: ignore[operator]
        return y


def test_a_block_that_changes_buffers_later_is_not_run_twice(settled: bool) -> None:
    """Not even in the pass in which it begins to. Where blocks are settled by then, it is an error."""
    plain = of_parts(*[NowAndThen] * 3)()
    model = copy.deepcopy(plain)
    trial = Trial(activation_room=0, small_bytes=1)
    with contextlib.closing(OffloadedActivations(model, "recompute", 16 * MiB, "auto", "cpu", trial=trial)) as kept:
        for step in range(6):
            for module in (module for side in (plain, model) for module in side.modules()):
                if isinstance(module, Timed):
                    module.step = step
            x = torch.randn(8, WIDTH)
            with kept:
                loss = model(x).square().mean()
            if settled and step == 3:
                with pytest.raises(StaleGraph, match="wrote to one of its tensors or arguments in place"):
                    loss.backward()
                return
            loss.backward()
            plain(x).square().mean().backward()
            same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], f"step {step}")
            same(list(model.buffers()), list(plain.buffers()), f"buffers, step {step}")


class WritesItsTable(Part, Timed):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(5000, WIDTH))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        y = super().middle(x + self.get_buffer("table")[:8])  # autograd does not save it
        if self.is_late:
            self.get_buffer("table").mul_(0.5)
        return y


class OverwritesItsInput(Block, Timed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x * 1)  # autograd does not save it
        if self.is_late:
            with torch.no_grad():
                x.mul_(0.5)
        return y


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (of_parts(*[WritesItsTable] * 3), "wrote to one of its tensors or arguments in place"),
        (of_each(*[OverwritesItsInput] * 3), "wrote to one of its tensors or arguments in place"),
    ],
)
def test_what_settled_blocks_may_not_begin_to_do(
    model: Callable[[], nn.Module], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stop with an error, and with no wrong gradient; the pass after it could be run again."""
    monkeypatch.setattr("stormtorch.streams.activations.runner.SETTLED_AT", ROUNDS)
    made = model()
    with contextlib.closing(opened(made, torch.device("cpu"))) as activations:
        for step in range(4):
            for module in made.modules():
                if isinstance(module, Timed):
                    module.step = step
            with activations:
                loss = made(torch.randn(8, WIDTH, requires_grad=True) * 1).square().mean()
            with pytest.raises(StaleGraph, match=why) if step == 3 else contextlib.nullcontext():
                loss.backward()


class Auxiliary(Part):
    """Leaves a loss of its own behind."""

    loss: torch.Tensor

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        y = super().middle(Watched.apply(x))  # type: ignore[no-untyped-call]
        self.loss = y.square().mean()
        return y


def test_a_loss_left_behind_keeps_no_graph() -> None:
    model = of_parts(*[Auxiliary] * 3)()
    with contextlib.closing(opened(model, torch.device("cpu"))) as activations:
        for step in range(STEPS):
            Watched.nodes.clear()
            with activations:
                loss = model(torch.randn(8, WIDTH)).square().mean()
                losses = [module.loss for module in model.modules() if isinstance(module, Auxiliary)]
                loss = loss + sum(losses)
            del losses
            first = len(Watched.nodes)
            loss.backward()
            del loss
            gc.collect()
            assert [node() for node in Watched.nodes[first:]] == [None] * (len(Watched.nodes) - first), f"step {step}"
            assert len(Watched.nodes) > first or step < 2, "nothing was run again"


class Raising(Part):
    """Fails after it has saved the result of its own operation."""

    fails = False

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(super().middle(Watched.apply(x)))  # type: ignore[no-untyped-call]
        if self.fails:
            raise ValueError("on purpose")
        return y


@pytest.mark.parametrize("at", [0, 2])
def test_a_block_that_raises_keeps_no_graph(at: int) -> None:
    """Not even until the garbage collector runs: code that catches the error may need the memory at once."""
    model = of_parts(*[Raising] * 3)()
    gc.disable()
    try:
        with contextlib.closing(opened(model, torch.device("cpu"))) as activations:
            for step in range(STEPS):
                parts = [module for module in model.modules() if isinstance(module, Raising)]
                parts[at].fails = step == STEPS - 1
                Watched.nodes.clear()
                with contextlib.suppress(ValueError), activations:
                    model(torch.randn(8, WIDTH)).square().mean().backward()
            assert len(Watched.nodes) == at + 1
            assert [node() for node in Watched.nodes] == [None] * (at + 1)
    finally:
        gc.enable()


class Result:
    """Not a tensor, a list or a dict: what it contains is not looked at."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class LeavingAnObject(Part):
    """Leaves a new object with a loss behind in each call."""

    result: Result | None = None

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        y = super().middle(Watched.apply(x))  # type: ignore[no-untyped-call]
        self.result = Result(y.square().mean())
        return y


def test_an_object_left_behind_is_kept_by_the_block_alone() -> None:
    model = of_parts(*[LeavingAnObject] * 3)()
    Watched.nodes.clear()
    with contextlib.closing(opened(model, torch.device("cpu"))) as activations:
        for _ in range(STEPS):
            with activations:
                loss = model(torch.randn(8, WIDTH)).square().mean()
            loss.backward()
        del loss
        for module in model.modules():
            if isinstance(module, LeavingAnObject):
                module.result = None
        gc.collect()
        assert [node() for node in Watched.nodes] == [None] * len(Watched.nodes)


def _nothing(_side: nn.Module, _step: int) -> None:
    pass


def train_alike(
    part: Callable[[], nn.Module],
    *,
    way: str = "away",
    before: Callable[[nn.Module, int], None] = _nothing,
    between: Callable[[nn.Module, int], None] = _nothing,
) -> Iterator[tuple[int, nn.Module]]:
    """Train three blocks in plain PyTorch and with STORM; gradients and buffers are the same after each step. User code
    runs ``before`` each forward, and ``between`` forward and backward. Yields the step and STORM's model."""
    torch.manual_seed(0)
    plain = of_parts(*[part] * 3)()
    model = copy.deepcopy(plain)
    with contextlib.closing(opened(model, torch.device("cpu"), way)) as activations:
        for step in range(STEPS):
            x = torch.randn(8, WIDTH)
            for side, context in ((plain, contextlib.nullcontext()), (model, activations)):
                before(side, step)
                side.zero_grad()
                with context:
                    loss = side(x).square().mean()
                between(side, step)
                loss.backward()
            same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], f"step {step}")
            same(list(model.buffers()), list(plain.buffers()), f"buffers, step {step}")
            yield step, model


class Averaging(Part):
    """Has a buffer from the second step on."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        if "mean" in self._buffers:
            mean = self.get_buffer("mean")
            self.mean = 0.5 * mean + 0.5 * x.detach().mean(0)
            x = x * (1 + mean)
        return super().middle(x)


class Reordering(Part):
    """Goes through a dict, and changes its order in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = {"a": 2.0, "b": 3.0}

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        first = next(iter(self.factors))
        factor = self.factors.pop(first)
        self.factors[first] = factor
        return super().middle(x * factor)


class WithFirstBuffer(Part):
    """Registers its first buffer in its first call, and computes with it from then on."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        if "mean" in self._buffers:
            return super().middle(x * (2 + self.get_buffer("mean")))
        self.register_buffer("mean", x.detach().mean(0))
        return super().middle(x)


class Swapping(Part):
    """Two children change places in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 64)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        y = super().middle(x)
        self.wide, self.other = self.other, self.wide
        return y


@pytest.mark.parametrize("way", ["away", "kept", "auto"])
@pytest.mark.parametrize("part", [Averaging, Reordering, Swapping, WithFirstBuffer])
def test_what_changes_without_a_new_attribute(part: type[Part], way: str) -> None:
    def give_buffers(side: nn.Module, step: int) -> None:
        for module in side.modules():
            if isinstance(module, Averaging) and step == 1:
                module.register_buffer("mean", torch.ones(WIDTH))

    assert len(list(train_alike(part, way=way, before=give_buffers))) == STEPS


class Fickle(Part):
    """Computes with all that user code may change between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 64)
        self.register_buffer("mean", torch.ones(WIDTH))
        self.factors, self.by_name, self.factor = [2.0], {"a": 2.0}, 2.0

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return super().middle(x * self.get_buffer("mean") * self.factors[0] * self.by_name["a"] * self.factor)


def _swap(part: Fickle) -> None:
    part.wide, part.other = part.other, part.wide


def _replace_buffer(part: Fickle) -> None:
    part.mean = part.get_buffer("mean") * 2


def _change_list(part: Fickle) -> None:
    part.factors[0] += 1


def _change_dict(part: Fickle) -> None:
    part.by_name["a"] += 1


def _change_number(part: Fickle) -> None:
    part.factor += 1


@pytest.mark.parametrize("change", [_swap, _replace_buffer, _change_list, _change_dict, _change_number])
def test_what_user_code_changes_before_backward(change: Callable[[Fickle], None]) -> None:
    """Backward uses what forward found, and leaves what user code has set."""

    def change_all(side: nn.Module, _step: int) -> None:
        for module in side.modules():
            if isinstance(module, Fickle):
                change(module)

    assert len(list(train_alike(Fickle, between=change_all))) == STEPS


def _count_in_place(part: Fickle) -> None:
    part.get_buffer("mean").mul_(2)


def _write_bias(part: Fickle) -> None:
    with torch.no_grad():
        part.wide.bias.add_(1)


def test_a_small_buffer_that_user_code_writes_to_before_backward() -> None:
    """Plain PyTorch refuses where autograd has saved the buffer. Here gradients are those of the forward."""
    torch.manual_seed(0)
    plain = of_parts(*[Fickle] * 3)()
    model, x = copy.deepcopy(plain), torch.randn(8, WIDTH)
    plain(x).square().mean().backward()
    with contextlib.closing(opened(model, torch.device("cpu"), "away")) as activations:
        with activations:
            loss = model(x).square().mean()
        for part in model.modules():
            if isinstance(part, Fickle):
                _count_in_place(part)
        loss.backward()
    same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], "gradients of the forward")
    assert all(torch.equal(buffer, torch.full((WIDTH,), 2.0)) for buffer in model.buffers())


class WithLargeBuffer(Part):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(5000, WIDTH))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return super().middle(x * self.get_buffer("table")[:8])


def _write_table(part: WithLargeBuffer) -> None:
    part.get_buffer("table").mul_(2)


@pytest.mark.parametrize(("part", "write"), [(WithLargeBuffer, _write_table), (Fickle, _write_bias)])
def test_a_tensor_too_large_to_copy_that_is_written_to_is_an_error(
    part: type[Part], write: Callable[[Any], None]
) -> None:
    model = of_parts(*[part] * 3)()
    with contextlib.closing(opened(model, torch.device("cpu"), "away")) as activations:
        with activations:
            loss = model(torch.randn(8, WIDTH)).square().mean()
        for module in model.modules():
            if isinstance(module, part):
                write(module)
        with pytest.raises(StaleGraph, match="was written to since its forward"):
            loss.backward()


class CountingObject:
    def __init__(self) -> None:
        self.calls = 0


class WithState(Part):
    """Has a state of its own, in various places, and computes with it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, CountingObject()
        self.of_numpy, self.of_python = np.random.default_rng(0), random.Random(0)
        self.tensors, self.lists, self.array = {"a": torch.ones(())}, {"a": [0.0]}, np.zeros(3)
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("running_mean", torch.zeros(64))
        self.register_buffer("running_var", torch.ones(64))
        self.stack: list[float] = []

    def factor(self) -> float:
        found = 1.0
        match self.kind:
            case "numpy's generator":
                found = float(self.of_numpy.random())
            case "Python's generator":
                found = self.of_python.random()
            case "a dict of tensors":
                found = float(self.tensors["a"].add_(1))
            case "a dict of lists":
                self.lists["a"][0] += 1
                found = 1 + self.lists["a"][0]
            case "an array":
                self.array += 1
                found = 1 + float(self.array[0])
            case "an object":
                self.calls.calls += 1
                found = float(self.calls.calls)
        return found

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.stack.append(1.0)
        y = super().middle(x * self.get_buffer("mean") * self.factor())
        if self.kind == "a buffer's data":
            self.get_buffer("mean").data.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        if self.kind == "statistics":
            mean, var = self.get_buffer("running_mean"), self.get_buffer("running_var")
            y = nn.functional.batch_norm(y, mean, var, training=True)
        y = torch.tanh(y)
        self.stack.pop()
        return y


STATES = ["numpy's generator", "Python's generator", "a dict of tensors", "a dict of lists", "an array", "an object"]


@pytest.mark.parametrize("kind", [*STATES, "a buffer's data", "statistics", "a stack"])
def test_state_of_a_block_that_is_not_an_attribute(kind: str) -> None:
    for step, model in train_alike(functools.partial(WithState, kind)):
        for module in model.modules():
            if isinstance(module, WithState):
                assert module.stack == []
                assert module.calls.calls == (step + 1 if kind == "an object" else 0)


_calls = [0]


class WithGlobalState(Part):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        _calls[0] += 1
        return super().middle(x * _calls[0])


class Inner:
    def __init__(self) -> None:
        self.object = CountingObject()


class WithHiddenState(Part):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.object.calls += 1
        return super().middle(x * self.inner.object.calls)


class WithSmallState(Part):
    """The effect is 1 %."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        _calls[0] += 1
        return super().middle(x * (1 + 0.01 * (_calls[0] % 3)))


_generator = torch.Generator()


class WithGlobalMask(Part):
    """Autograd saves the mask alone, which is not of floating point."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * (torch.rand(y.shape, generator=_generator) > 0.5).to(y.device)


class WithCodebook(Part):
    """Writes a large buffer in a way that no version counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.randn(4096, WIDTH))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        bank = self.get_buffer("bank")
        nearest = torch.cdist(x.detach(), bank).argmin(-1)
        y = super().middle(x + 0.1 * bank[nearest])
        bank.data[nearest] = 0.5 * bank.data[nearest]
        return y


@pytest.mark.parametrize("part", [WithGlobalState, WithHiddenState, WithSmallState, WithGlobalMask, WithCodebook])
def test_state_that_is_not_found_is_an_error(part: type[Part], device: torch.device) -> None:
    """In the first backward, not a wrong gradient."""
    model = of_parts(*[part] * 3)().to(device)
    with contextlib.closing(opened(model, device, "away")) as activations:
        with activations:
            loss = model(torch.randn(8, WIDTH, device=device)).square().mean()
        with pytest.raises(StaleGraph, match="has other values than in forward"):
            loss.backward()


class WithLateState(WithHiddenState):
    begins = False

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return super().middle(x) if self.begins else Part.middle(self, x)


@pytest.mark.parametrize("between", ["nothing", "another", "no backward"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
def test_state_that_appears_late_is_an_error(
    device: torch.device, between: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block of each pass is compared, by chance. A device that compares by itself tells when a later pass begins:
    by then other blocks may run, or no backward may follow."""
    if asynchronous:
        monkeypatch.setattr("stormtorch.streams.activations.runner._ASYNCHRONOUS", frozenset({"cpu", "cuda"}))
    model = of_parts(Part, WithLateState, Part)().to(device)
    other = nn.Sequential(*list(model.children())[-1:])

    def x() -> torch.Tensor:
        return torch.randn(8, WIDTH, device=device)

    with contextlib.closing(opened(model, device, "away")) as activations:

        def train(steps: int) -> None:
            for _ in range(steps):
                with activations:
                    loss = model(x()).square().mean()
                loss.backward()
                if between != "nothing":
                    with activations:
                        loss = (other if between == "another" else model)(x()).square().mean()
                    if between == "another":
                        loss.backward()

        train(6)
        WithLateState.begins = True
        try:
            with pytest.raises(StaleGraph, match="has other values than in forward"):
                train(100)
        finally:
            WithLateState.begins = False


class TimesANumber(Part):
    """Computes with a number in RAM, which torch saves."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return super().middle(x) * torch.tensor(0.5) / torch.tensor(3.0)


def test_numbers_in_ram_are_compared(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stormtorch.streams.activations.runner._ASYNCHRONOUS", frozenset({"cpu", "cuda"}))
    model = of_parts(*[TimesANumber] * 3)().to(device)
    with contextlib.closing(opened(model, device, "away")) as activations:
        for _ in range(30):
            with activations:
                loss = model(torch.randn(8, WIDTH, device=device)).square().mean()
            loss.backward()


class UnfilledNoise(Part):
    """In eval, torch saves noise that it has not filled and does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.RReLU()

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.act.eval()
        y: torch.Tensor = self.act(self.wide(x))
        return y


class UnfilledRows(Part):
    """An expert with a fixed capacity: rows that are never read."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x.sum(-1) > 0).nonzero().flatten()
        rows = torch.nan_to_num(x.new_empty(8, WIDTH), 0, 0, 0).clamp(-9, 9)
        rows[: len(chosen)] = x[chosen]
        y = torch.tanh(self.wide(rows))
        return torch.sin(x.new_zeros(8, 64).index_copy(0, chosen, y[: len(chosen)]))


class Forking(Part):
    """Draws numbers, and leaves the generator as it was."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            noise = torch.randn(8, 64)
        return torch.sin(self.wide(x) * noise)


class Unregistered(Part):
    """Keeps a module in a list, which therefore is none of its children, and counts there."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [CountingModule()]

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden[0].calls += 1
        return super().middle(x * (1 + 0.01 * self.hidden[0].calls))


class CountingModule(nn.Module):
    calls = 0


@pytest.mark.parametrize("part", [UnfilledNoise, UnfilledRows, Forking, Unregistered])
def test_no_false_alarm(part: type[Part]) -> None:
    """Memory that torch never reads may differ; numbers that a block draws may not."""

    def fill_free_memory(_model: nn.Module, step: int) -> None:
        torch.manual_seed(step)
        garbage = [torch.full((8, size), float(step + 1)) for size in (WIDTH, 64) for _ in range(32)]
        del garbage

    def draw(_model: nn.Module, step: int) -> None:
        fill_free_memory(_model, step + 100)
        torch.rand(1)

    assert len(list(train_alike(part, before=fill_free_memory, between=draw))) == STEPS


def test_attributes_that_were_replaced_together() -> None:
    def replace(model: nn.Module, step: int) -> None:
        part = model.get_submodule("1.part")
        vars(part)["factor"] = 2.0
        if step == 2:
            part.__dict__ = dict(part.__dict__)

    def change(model: nn.Module, _step: int) -> None:
        vars(model.get_submodule("1.part"))["factor"] = 9.0

    assert len(list(train_alike(Factored, before=replace, between=change))) == STEPS


class Factored(Part):
    factor = 2.0

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.wide(x) * self.factor)


class Scaled(Part):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(64) + 0.5)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.wide(x)) * self.get_buffer("scale")


def _scale(buffer: torch.Tensor, _gradient: torch.Tensor) -> None:
    buffer.mul_(1.5)


@pytest.mark.parametrize("streams", [False, True])
def test_a_write_between_two_gradients(streams: bool) -> None:
    """A hook writes to a buffer that the rest of backward needs: an error, as in plain PyTorch."""
    model = of_parts(*[Scaled] * 3)()
    for module in model.modules():
        if isinstance(module, Scaled):
            module.narrow.bias.register_hook(functools.partial(_scale, module.get_buffer("scale")))
    way = opened(model, torch.device("cpu"), "away") if streams else contextlib.nullcontext()
    with way:
        loss = model(torch.randn(8, WIDTH)).square().mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    if isinstance(way, OffloadedActivations):
        way.close()


def test_a_hook_that_is_registered_before_backward() -> None:
    """It would run in the second run, and change it."""
    model = of_parts(*[Part] * 3)()
    with contextlib.closing(opened(model, torch.device("cpu"), "away")) as activations:
        with activations:
            loss = model(torch.randn(8, WIDTH)).square().mean()
        model.get_submodule("1.part.wide").register_forward_hook(lambda _module, _args, y: y * 2)
        with pytest.raises(StaleGraph, match="a hook was registered"):
            loss.backward()


class Conditioned(Part):
    """Adds an attribute that user code sets before the forward and removes after it."""

    condition: torch.Tensor | None = None

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        assert self.condition is not None
        return super().middle(x + self.condition)


def test_a_condition_with_a_graph_that_is_removed_before_backward() -> None:
    torch.manual_seed(0)
    plain = of_parts(*[Conditioned] * 3)()
    model = copy.deepcopy(plain)
    weights = [torch.ones(WIDTH, requires_grad=True) for _ in range(2)]
    with contextlib.closing(opened(model, torch.device("cpu"), "away")) as activations:
        for step in range(STEPS):
            x = torch.randn(8, WIDTH)
            contexts: list[Any] = [contextlib.nullcontext(), activations]
            for side, weight, context in zip((plain, model), weights, contexts, strict=True):
                side.zero_grad()
                parts = [module for module in side.modules() if isinstance(module, Conditioned)]
                for part in parts:
                    part.condition = weight * 2
                with context:
                    loss = side(x).square().mean()
                for part in parts:
                    part.condition = None
                loss.backward()
            same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], f"step {step}")
    same([weights[0].grad], [weights[1].grad], "of the condition")


def test_a_parameter_that_is_removed_later() -> None:
    def remove(side: nn.Module, step: int) -> None:
        for module in side.modules():
            if isinstance(module, Part) and step == 2:
                module.wide.bias = None  # type: ignore[assignment]
        gc.collect()

    assert len(list(train_alike(Part, before=remove))) == STEPS


@pytest.mark.parametrize("later", ["attribute", "parameter"])
def test_a_name_that_changes_between_parameter_and_attribute(later: str) -> None:
    torch.manual_seed(0)
    plain = of_parts(*[Part] * 3)()
    model = copy.deepcopy(plain)
    x = torch.randn(8, WIDTH)
    with contextlib.closing(opened(model, torch.device("cpu"), "away")) as activations:
        for side, context in ((plain, contextlib.nullcontext()), (model, activations)):
            wide = next(module for module in side.modules() if isinstance(module, Part)).wide
            bias: Any = wide.bias
            values = bias.detach().clone()
            if later == "parameter":
                del wide.bias
                wide.bias = values
            with context:
                loss = side(x).square().mean()
            del wide.bias  # between forward and backward, as `prune` and `weight_norm` do
            wide.bias = values if later == "attribute" else bias
            loss.backward()
            assert wide.bias is (values if later == "attribute" else bias)
            assert ("bias" in wide._parameters) == (later == "parameter")
    same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], later)


def test_a_child_that_is_added_later() -> None:
    def add(side: nn.Module, step: int) -> None:
        for module in list(side.modules()):
            if isinstance(module, Part) and step == 2:
                module.narrow = nn.Sequential(nn.BatchNorm1d(64), module.narrow)  # type: ignore[assignment]

    assert len(list(train_alike(Part, before=add))) == STEPS


class Catching(Part):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().middle(x)
        except Exception:
            return x.new_zeros(len(x), 64)


class Ring(deque[float]):
    """Its own ``copy`` fails: it takes no other arguments."""

    def __init__(self, size: int) -> None:
        super().__init__([1.0] * size, maxlen=size)

    def __deepcopy__(self, _memo: object) -> Ring:
        return Ring(len(self))


class WithRing(Part):
    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring(3)


@pytest.mark.parametrize("part", [Catching, WithRing])
def test_parts_that_only_look_difficult(part: type[Part]) -> None:
    assert len(list(train_alike(part))) == STEPS


class SameWeight(torch.autograd.Function):
    """Returns a view of a weight, and saves that."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.watched = torch.nn.Identity()
        Watched.nodes.append(weakref.ref(ctx.watched))
        result = weight.view_as(weight)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        assert ctx.saved_tensors
        return gradients[0]


class WithSameWeight(Part):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = SameWeight.apply(self.wide.weight)  # type: ignore[no-untyped-call]
        return torch.tanh(nn.functional.linear(x, weight, self.wide.bias))


def test_a_view_of_a_weight_that_its_node_saves_keeps_no_graph(device: torch.device) -> None:
    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        return x, x

    model = of_parts(*[WithSameWeight] * 4)
    Watched.nodes.clear()
    case = Case("views", model, batch, lambda model, given: model(given[0]).square().mean())
    with Pair(case, sgd, device=device, room=0) as pair:
        pair.steps(5)
        pair.check()
        gc.collect()
        assert [node() for node in Watched.nodes] == [None] * len(Watched.nodes)


class BestOf(Part):
    """Throws most of its work away."""

    alive: int = 0

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        thrown = []
        for factor in range(6):
            thrown.append(StorageWeakRef(torch.tanh(self.wide(x * factor)).untyped_storage()))
        self.alive = sum(not storage.expired() for storage in thrown)
        return super().middle(x)


@pytest.mark.parametrize("way", ["away", "kept", "auto"])
def test_work_that_a_block_throws_away_is_freed_at_once(way: str) -> None:
    model = of_parts(*[BestOf] * 2)()
    gc.disable()
    try:
        with contextlib.closing(opened(model, torch.device("cpu"), way)) as activations:
            for _ in range(STEPS):
                with activations:
                    loss = model(torch.randn(8, WIDTH)).square().mean()
                loss.backward()
                assert [module.alive for module in model.modules() if isinstance(module, BestOf)] == [0, 0]
    finally:
        gc.enable()


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_attributes_that_user_code_removes_are_freed(steps: int) -> None:
    model = of_parts(*[Part] * 2)()
    with contextlib.closing(opened(model, torch.device("cpu"))) as activations:
        tensor = torch.randn(8)
        reference = weakref.ref(tensor)
        part: Any = next(module for module in model.modules() if isinstance(module, Part))
        part.cache, part.result = (tensor,), Result(tensor)
        del tensor
        for _ in range(steps):
            with activations:
                loss = model(torch.randn(8, WIDTH)).square().mean()
            loss.backward()
        del loss, part.cache, part.result
        gc.collect()
        assert reference() is None


class Pointing(Part):
    """Has a weak reference of its own."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        y = super().middle(x)
        self.kept, self.pointer = [y], weakref.ref(y)
        return y


def test_weak_references_remain_weak_references() -> None:
    model = of_parts(*[Pointing] * 2)()
    with contextlib.closing(opened(model, torch.device("cpu"))) as activations:
        for _ in range(STEPS):
            with activations:
                loss = model(torch.randn(8, WIDTH)).square().mean()
            loss.backward()
            pointers = [module.pointer for module in model.modules() if isinstance(module, Pointing)]
            assert [type(pointer) for pointer in pointers] == [weakref.ref] * 2


def test_backward_in_inference_mode() -> None:
    model = of_parts(*[Part] * 3)()
    x = torch.randn(8, WIDTH)
    model(x).square().mean().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with contextlib.closing(opened(model, torch.device("cpu"))) as activations:
        with activations:
            loss = model(x).square().mean()
        with torch.inference_mode():
            loss.backward()
    same([p.grad for p in model.parameters()], expected, "gradients")


class Reaching(nn.Module):
    """A block that uses the weight of a module outside of it."""

    def __init__(self, table: nn.Linear) -> None:
        super().__init__()
        self.one, self.table = nn.Linear(WIDTH, WIDTH), [table]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(nn.functional.linear(torch.sin(self.one(x)), self.table[0].weight))


class Reached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.blocks = nn.ModuleList(Reaching(cast(nn.Linear, table)) for table in self.tables)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for block in self.blocks:
            x = block(x)
        return x


def test_streamed_weights_of_others(device: torch.device) -> None:
    """What lending one takes is ours, and not the block's to run again."""

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        return x, x

    case = Case("reached", Reached, batch, lambda model, given: model(given[0]).square().mean())
    with Pair(case, sgd, device=device, room=0) as pair:
        pair.steps(5)
        pair.check()


class Doubling(TorchFunctionMode):
    """Changes what a function gives, as long as it is there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


@pytest.mark.parametrize("way", WAYS)
def test_a_mode_around_the_forward_is_not_there_in_backward(way: str) -> None:
    """So a block that ran under one is not run again."""
    torch.manual_seed(0)
    plain = of_parts(*[Part] * 3)()
    model = copy.deepcopy(plain)
    with contextlib.closing(opened(model, torch.device("cpu"), way)) as activations:
        for step in range(STEPS):
            x = torch.randn(8, WIDTH, requires_grad=True)
            for side, context in ((plain, contextlib.nullcontext()), (model, activations)):
                with context, Doubling() if step >= 2 else contextlib.nullcontext():
                    loss = side(x).square().mean()
                loss.backward()
            same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], f"step {step}")


class Unfaithful(Part):
    """Runs otherwise in backward, by something that cannot be seen."""

    calls: ClassVar[list[int]] = []

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        return super().middle(x) if len(self.calls) % 2 else torch.sigmoid(self.wide(x))


def test_a_block_that_saves_other_tensors_in_backward_is_an_error() -> None:
    model = of_parts(*[Unfaithful] * 2)()
    with contextlib.closing(opened(model, torch.device("cpu"))) as activations:
        with activations:
            loss = model(torch.randn(8, WIDTH)).square().mean()
        with pytest.raises(StaleGraph, match=r'Cannot recompute a Block: .* set activations="offload"'):
            loss.backward()
