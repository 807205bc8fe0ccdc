"""Law: whatever becomes of activations until backward, gradients and buffers are plain PyTorch's, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import stormtorch as storm
from stormtorch.core.sizes import MiB
from stormtorch.core.tags import Tag, Tier
from stormtorch.session.offload import OffloadedActivations
from stormtorch.streams.activations import planning
from stormtorch.streams.activations.plans.plan import KEEP, RECOMPUTE_FROM_RAM, ActivationPlan, BlockProfile, Means
from stormtorch.streams.bridge.torch_private import StorageReference
from stormtorch.streams.settings import Trial

from ..thinning import daily
from .models import (
    CHAIN,
    HUGGINGFACE,
    LLAMA,
    OTHERS,
    RECOMPUTED,
    Case,
    ChainBlock,
    Llama,
    Pair,
    adamw,
    frozen,
    jitter,
    on,
    one_thread,  # noqa: F401  # a fixture
    same,
    sgd,
    stream,
    train,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:mkldnn_matmul"),  # said once, by a CPU without bf16
    pytest.mark.filterwarnings("ignore:RNN module weights are not part"),  # after a deepcopy
]
CASES = [CHAIN, LLAMA, RECOMPUTED, HUGGINGFACE, *OTHERS]
# What is done with activations, and how much of the device they seem to find free.
WAYS: list[tuple[str, int | None]] = [
    ("keep", None),
    ("offload", None),
    ("recompute", 0),
    ("recompute", 50_000),
    ("recompute", -1),  # not even a recomputed block has room
    ("auto", 0),
    ("auto", 100_000),
    ("auto", 1_000_000_000),
]
ids = [f"{mode}-{room}" for mode, room in WAYS]


def opened(
    model: nn.Module | None,
    mode: str,
    room: int | None = None,
    *,
    device: torch.device | str = "cpu",
    vram: object = 200_000,
    seed: int | None = 0,
) -> OffloadedActivations:
    """With random delays in the lanes, NaN in all memory that is given back, and nothing too small to travel."""
    device = torch.device(device)
    if device.type == "cuda" and isinstance(vram, int):
        vram = max(vram, 16 * MiB)
    trial = Trial(
        delay=None if seed is None else jitter(device, seed),
        poison=seed is not None,
        activation_room=room,
        small_bytes=1,
    )
    return OffloadedActivations(model, mode, vram, "auto", device, trial=trial)


def outcome(model: nn.Module, loss: torch.Tensor) -> Any:
    grads = {name: frozen(p.grad) for name, p in model.named_parameters()}
    return [loss.detach().cpu(), grads, {name: frozen(buffer) for name, buffer in model.named_buffers()}]


@pytest.mark.parametrize(("mode", "room"), WAYS, ids=ids)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_gradients(case: Case, mode: str, room: int | None, device: torch.device) -> None:
    plain = case.build().to(device)
    model = copy.deepcopy(plain)
    activations = opened(model, mode, room, device=device)
    for step in range(4):
        results = []
        for side in (plain, model):
            torch.manual_seed(step)
            batch = on(case.batch(step), device)
            side.zero_grad()
            if side is model:
                with activations:
                    loss = case.loss(side, batch)
            else:
                loss = case.loss(side, batch)
            loss.backward()
            results.append(outcome(side, loss))
            with torch.no_grad():
                for parameter in side.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.01)
        same(results[1], results[0], f"step {step}")
    activations.close()
    assert activations.ledger.used_bytes(Tier.HOST) == 0
    assert not any("_call_impl" in vars(module) for module in model.modules())


# --- graphs of all kinds

Graph = Callable[[nn.Module, torch.Tensor], Any]


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = x * y + x.sin()
        ctx.save_for_backward(x, y, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y, result = ctx.saved_tensors
        return grad * (y + x.cos() + 0 * result), grad * x


def views(net: nn.Module, x: torch.Tensor) -> Any:
    y = net(x)
    wide = y.t().unsqueeze(1).expand(-1, 3, -1)
    parts = [y[:, ::2].exp(), y[1:, 3:].sigmoid().sum(), y.view(2, -1)[1].tanh(), y.diagonal().square()]
    return sum((part.sum() for part in parts), wide.exp().mean())


def in_place(net: nn.Module, x: torch.Tensor) -> Any:
    y = net(x) * 1.0
    y.relu_()
    z = y.mul(2.0)
    z.add_(y).clamp_(max=3.0)
    return (z.exp_() * 0.1).sum()


def shared_inputs(net: nn.Module, x: torch.Tensor) -> Any:
    y = net(x)
    return (y * y).sum() + (y.exp() * y.sin() * x).sum() + (y @ y.t()).tanh().sum()


def own_function(net: nn.Module, x: torch.Tensor) -> Any:
    y = net(x)
    return Own.apply(y, Own.apply(x, y)).sum()  # type: ignore[no-untyped-call]


def used_twice(net: nn.Module, x: torch.Tensor) -> Any:
    return net(net(x)).square().mean()


def nested_checkpoint(net: nn.Module, x: torch.Tensor) -> Any:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(checkpoint(net, y.sin(), use_reentrant=False)).exp()

    return torch.as_tensor(checkpoint(inner, net(x), use_reentrant=False)).sum()


def complex_numbers(net: nn.Module, x: torch.Tensor) -> Any:
    y = torch.complex(net(x), x)
    return (y.conj() * y.exp() * torch.view_as_complex(torch.stack([x, x.cos()], -1))).abs().sum()


def integers(net: nn.Module, x: torch.Tensor) -> Any:
    y = net(x)
    index = y.argsort(dim=1)
    return y.gather(1, index).cumsum(1).square().sum() + y[:, torch.arange(3, device=x.device)].sum()


def nothing_at_all(net: nn.Module, x: torch.Tensor) -> Any:
    y = net(x)
    return y.sum() + (y[:0].exp() * y[:0]).sum() + (x.new_zeros(0, 8) @ y[:8].sigmoid()).sum()


def dropped_out(net: nn.Module, x: torch.Tensor) -> Any:
    y = functional.dropout(net(x), 0.3)
    return functional.dropout(net(y), 0.5).square().sum()


def in_autocast(net: nn.Module, x: torch.Tensor) -> Any:
    with torch.autocast(x.device.type, torch.bfloat16):
        return net(net(x)).float().square().sum()


def sparse_views(net: nn.Module, x: torch.Tensor) -> Any:
    """A small part of a large storage."""
    big = torch.cat([net(x)] * 16)
    return big[5:7, 3:9].exp().prod(0).sum()


GRAPHS: list[Graph] = [
    views,
    in_place,
    shared_inputs,
    own_function,
    used_twice,
    nested_checkpoint,
    complex_numbers,
    integers,
    nothing_at_all,
    dropped_out,
    in_autocast,
    sparse_views,
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(functional.dropout(functional.gelu(self.up(self.norm(x))), 0.2))
        return x + y


def net(width: int = 16, blocks: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


@pytest.fixture
def pair(device: torch.device) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    model = net().to(device)
    return model, copy.deepcopy(model), torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize(("mode", "room"), WAYS[1:], ids=ids[1:])
@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.__name__)
def test_any_graph(
    graph: Graph,
    mode: str,
    room: int | None,
    device: torch.device,
    pair: tuple[nn.Module, nn.Module, torch.Tensor],
) -> None:
    plain, model, data = pair
    activations = opened(model, mode, room, device=device)
    for step in range(4):
        results = []
        for side in (plain, model):
            torch.manual_seed(step)
            side.zero_grad()
            x = data.clone().requires_grad_()
            if side is model:
                with activations:
                    loss = graph(side, x)
            else:
                loss = graph(side, x)
            loss.backward()
            results.append([*outcome(side, loss), frozen(x.grad)])
        same(results[1], results[0], f"step {step}")
    activations.close()


@pytest.mark.parametrize(("mode", "room"), WAYS[1:], ids=ids[1:])
def test_graphs_that_stay(
    mode: str, room: int | None, device: torch.device, pair: tuple[nn.Module, nn.Module, torch.Tensor]
) -> None:
    """Retained, run twice, run in another order, dropped, left behind by an exception, not recorded at all."""
    plain, model, data = pair
    activations = opened(model, mode, room, device=device)

    def forward(side: nn.Module, x: torch.Tensor) -> Any:
        if side is model:
            with activations:
                return side(x).square().mean()
        return side(x).square().mean()

    def fail(side: nn.Module) -> None:
        hook = side.get_submodule("3").register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyError("stop")))
        try:
            with pytest.raises(KeyError):
                forward(side, data)
        finally:
            hook.remove()

    def scenario(side: nn.Module) -> Iterator[torch.Tensor]:
        loss = forward(side, data)
        loss.backward(retain_graph=True)
        loss.backward()
        yield loss
        first, second = forward(side, data + 1), forward(side, data + 2)
        first.backward()
        second.backward()
        yield first + second
        forward(side, data)  # dropped
        fail(side)
        with torch.no_grad():
            yield forward(side, data)
        later, earlier = forward(side, data), forward(side, data * 2)
        (later * earlier).backward()
        yield later
        (again,) = torch.autograd.grad(forward(side, data), [side.get_parameter("0.up.weight")])
        yield again

    for step in range(3):
        results: list[list[Any]] = []
        for side in (plain, model):
            torch.manual_seed(step)
            side.zero_grad()
            results.append([[value.detach().cpu() for value in scenario(side)], outcome(side, torch.zeros(()))])
        same(results[1], results[0], f"step {step}")
    gc.collect()
    slabs = activations.saving._stream._slabs
    assert slabs.taken_bytes == 0
    slabs.check()
    activations.close()


@pytest.mark.parametrize("mode", ["offload", "recompute", "auto"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks(mode: str) -> None:
    torch._dynamo.reset()
    plain = net(blocks=3).eval()
    model = copy.deepcopy(plain)
    for side in (plain, model):
        for block in side.children():
            block.compile(backend="aot_eager", dynamic=False)
    activations = opened(model, mode, 0)
    for step in range(3):
        results = []
        for side in (plain, model):
            side.zero_grad()
            torch.manual_seed(step)
            x = torch.randn(8, 16)
            if side is model:
                with activations:
                    loss = side(x).square().mean()
            else:
                loss = side(x).square().mean()
            loss.backward()
            results.append(outcome(side, loss))
        same(results[1], results[0], f"step {step}")
    activations.close()
    torch._dynamo.reset()


# --- what must be refused, and what must not happen


@pytest.mark.parametrize("model", [None, "net"])
def test_a_change_in_place_is_noticed(model: str | None) -> None:
    activations = opened(net() if model else None, "offload")
    x = torch.randn(64, 64, requires_grad=True)
    with activations:
        y = x.exp()
        loss = y.sum()
    y.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    activations.close()


def test_nobody_notices_a_second_run() -> None:
    """Blocks that someone listens to, or that change their buffers, are not recomputed."""
    model = net(blocks=4)
    heard: list[int] = []
    model.get_submodule("1").register_forward_hook(lambda *_: heard.append(1))
    activations = opened(model, "recompute", 0)
    for step in range(3):
        with activations:
            loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        assert len(heard) == step + 1
    activations.close()


def test_a_larger_batch_is_measured_anew() -> None:
    model = net()
    activations = opened(model, "auto", 0)
    for rows in (4, 4, 4, 64, 64, 64, 4):
        with activations:
            loss = model(torch.randn(rows, 16)).square().mean()
        loss.backward()
        if rows == 64:
            sizes = [activations.saving.known.size(kind) for kind in activations.saving._sequence]
            assert sizes == [64 * 16 * 4] * 5
    activations.close()


def test_memory_is_flat_over_many_steps() -> None:
    model = net()
    activations = opened(model, "offload", seed=None)
    used = set()
    for step in range(daily(60, 200)):
        with activations:
            loss = model(torch.randn(16 + step % 3, 16)).square().mean()
        loss.backward()
        del loss
        if step >= 3:
            used.add(activations.ledger.used_bytes(Tier.HOST, Tag.ACTIVATIONS))
            assert activations.saving._stream._slabs.taken_bytes == 0
    assert len(used) == 1
    activations.close()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["offload", "recompute", "auto"])
def test_the_device_holds_no_more_than_its_budget(mode: str) -> None:
    """Activations several times as large as what is left of the budget, with the host running ahead."""
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    model = Llama(blocks=24, width=256).to(device)
    batch = torch.randint(0, 32, (64, 256), device=device)

    def step() -> None:
        loss = model(batch).float().square().mean()
        loss.backward()
        model.zero_grad()

    step()
    torch.cuda.synchronize()
    plain = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    resting = torch.cuda.memory_allocated()
    budget = resting + plain // 2
    assert plain > 1024 * MiB
    with_activations = storm.offload_activations(model, mode=mode, vram=budget)
    for _ in range(8):
        with with_activations:
            loss = model(batch).float().square().mean()
        loss.backward()
        model.zero_grad()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() <= budget
    with_activations.close()


# --- with parameters streamed too


@pytest.mark.parametrize(("mode", "room"), WAYS[1:7], ids=ids[1:7])
@pytest.mark.parametrize(
    ("name", "step", "accumulate", "clip"),
    [
        ("llama", "forward", 2, "torch"),
        ("llama", "backward", 1, "off"),
        ("conv", "forward", 2, "torch"),
        ("tied", "forward", 1, "off"),
        ("dropout", "backward", 1, "off"),
        ("moe", "forward", 1, "off"),
    ],
)
def test_streamed_parameters_too(name: str, step: str, accumulate: int, clip: str, mode: str, room: int | None) -> None:
    case = next(case for case in CASES if case.name == name)
    model, plain = case.build(), case.build()
    optimizer = adamw(model)
    with stream(model, optimizer, step=step, seed=0, activations=mode, room=room) as session:
        streamed = train(case, model, optimizer, steps=4, accumulate=accumulate, clip=clip, session=session)
    reference = train(case, plain, adamw(plain), steps=4, accumulate=accumulate, clip=clip)
    streamed.check(reference)


@pytest.mark.parametrize(("mode", "room"), WAYS[1:7], ids=ids[1:7])
@pytest.mark.parametrize("case", [LLAMA, HUGGINGFACE], ids=lambda case: case.name)
@pytest.mark.daily("llama")
def test_streamed_on_any_device(case: Case, mode: str, room: int | None, device: torch.device) -> None:
    with Pair(case, sgd, device=device, activations=mode, room=room) as pair:
        pair.steps(4)
        pair.check()


# --- what a review has found


def both(
    make: Callable[[], nn.Module],
    run: Callable[[nn.Module, contextlib.AbstractContextManager[Any], int], Any],
    mode: str,
    room: int | None,
    steps: int = 5,
) -> None:
    """``run`` gives the same with a model as with its twin, whose activations are arranged."""
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    activations = opened(model, mode, room)
    for step in range(steps):
        results = []
        for side, context in ((plain, contextlib.nullcontext()), (model, activations)):
            torch.manual_seed(step)
            random.seed(step)
            side.zero_grad()
            loss = run(side, context, step)
            results.append(outcome(side, loss))
        same(results[1], results[0], f"step {step}")
    activations.close()


@pytest.mark.parametrize(("mode", "room"), WAYS, ids=ids)
def test_a_graph_that_is_dropped_is_freed(mode: str, room: int | None) -> None:
    """Outputs that autograd saves, as those of tanh, must not keep their graph through what a hook returned."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    activations = opened(model, mode, room, seed=None)
    storages: list[StorageReference] = []
    for _ in range(6):
        with activations:
            y = model(torch.randn(8, 16)).exp()
            loss = y.sum()
        storages.append(StorageReference(y.untyped_storage()))
        del loss, y
    gc.collect()
    activations.saving._stream.begin_pass()  # lets go of what was on its way
    end_s = time.monotonic() + 300
    while not all(storage.gone for storage in storages) and time.monotonic() < end_s:
        time.sleep(0.01)  # a lane's thread may have a last look
    assert [storage.gone for storage in storages] == [True] * 6
    assert activations.saving._stream._slabs.taken_bytes == 0
    activations.close()


def test_a_dropped_graph_of_a_streamed_model_is_freed() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    with stream(model, vram="auto", activations="keep"):
        y = model(torch.randn(8, 16)).exp()
        loss = y.sum()
        storage = StorageReference(y.untyped_storage())
        del loss, y
        gc.collect()
        assert storage.gone


@pytest.mark.parametrize(("mode", "room"), WAYS, ids=ids)
def test_changes_in_place_are_noticed_in_every_way(mode: str, room: int | None) -> None:
    model = net()
    activations = opened(model, mode, room)
    for _ in range(3):
        with activations:
            y = model(torch.randn(16, 16)).exp()
            loss = y.sum()
        y.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    activations.close()


class Writing(nn.Module):
    """Changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.inner = nn.LeakyReLU(inplace=True), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(self.act(x))
        return y


class Listing(nn.Module):
    """Writes into a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
        y = torch.tanh(self.inner(x))
        losses.append(y.square().mean())
        return y


class Averaging(nn.Module):
    """Puts another buffer in place of the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return torch.tanh(self.inner(x) + self.mean)


class Skipping(nn.Module):
    """Random, but not by torch's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) if random.random() < 0.5 else x.sin()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.inner(x)))


def through(model: nn.Module, context: contextlib.AbstractContextManager[Any], _step: int) -> Any:
    with context:
        loss = model(torch.randn(8, 16) * 1.0).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize(("mode", "room"), WAYS[1:], ids=ids[1:])
@pytest.mark.parametrize("kind", [Writing, Averaging, Skipping, Normed])
def test_blocks_that_must_not_run_twice(kind: type[nn.Module], mode: str, room: int | None) -> None:
    both(lambda: nn.Sequential(*(kind() for _ in range(4))), through, mode, room)


class Noisy(nn.Module):
    """Saves noise that it has not drawn yet."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rrelu(self.inner(x), training=True)


@pytest.mark.parametrize(("mode", "room"), WAYS[1:], ids=ids[1:])
@pytest.mark.parametrize("kind", [Noisy, lambda: nn.Sequential(nn.Linear(16, 16), nn.RReLU())], ids=["own", "module"])
def test_what_is_saved_before_it_is_written(kind: Callable[[], nn.Module], mode: str, room: int | None) -> None:
    both(lambda: nn.Sequential(*(kind() for _ in range(4))), through, mode, room)


@pytest.mark.parametrize(("mode", "room"), WAYS[1:], ids=ids[1:])
def test_lists_that_blocks_write_into(mode: str, room: int | None) -> None:
    def run(model: nn.Module, context: contextlib.AbstractContextManager[Any], _step: int) -> Any:
        losses: list[torch.Tensor] = []
        with context:
            x = torch.randn(8, 16)
            for block in model.children():
                x = block(x, losses)
            loss = x.sum() + torch.stack(losses).sum()
        loss.backward()
        return loss

    both(lambda: nn.ModuleList(Listing() for _ in range(4)), run, mode, room)


@pytest.mark.parametrize(("mode", "room"), WAYS[1:], ids=ids[1:])
@pytest.mark.daily("offload-None", "recompute-0", "auto-0", "auto-100000")
def test_manners_that_change(mode: str, room: int | None) -> None:
    """Evaluated first, trained later; frozen, then not; switched to eval before backward."""

    def run(model: nn.Module, context: contextlib.AbstractContextManager[Any], step: int) -> Any:
        model.train(step > 2)
        model.requires_grad_(step > 1)
        with context:
            loss = model(torch.randn(8, 16).requires_grad_()).square().mean()
        model.eval()
        loss.backward()
        return loss

    both(lambda: nn.Sequential(*(Normed() for _ in range(4))), run, mode, room, steps=8)
    both(lambda: net(blocks=4), run, mode, room, steps=8)


@pytest.mark.parametrize(("mode", "room"), WAYS[1:], ids=ids[1:])
@pytest.mark.daily("offload-None", "recompute-0", "auto-0", "auto-100000")
def test_an_earlier_graph_runs_again_after_the_next_forward(mode: str, room: int | None) -> None:
    def run(model: nn.Module, context: contextlib.AbstractContextManager[Any], _step: int) -> Any:
        with context:
            first = model(torch.randn(8, 16)).square().mean()
        first.backward(retain_graph=True)
        with context:
            second = model(torch.randn(8, 16)).square().mean()
        (first + second).backward()
        return first + second

    both(lambda: net(blocks=4), run, mode, room)


@pytest.mark.parametrize(("mode", "room"), WAYS[1:], ids=ids[1:])
@pytest.mark.daily("offload-None", "recompute-0", "auto-0", "auto-100000")
def test_parameters_that_are_there_for_one_call(mode: str, room: int | None) -> None:
    def run(model: nn.Module, context: contextlib.AbstractContextManager[Any], _step: int) -> Any:
        doubled = {name: parameter * 2 for name, parameter in model.named_parameters()}
        with context:
            loss = torch.func.functional_call(model, doubled, (torch.randn(8, 16),)).square().mean()
        loss.backward()
        return loss

    both(lambda: net(blocks=4), run, mode, room)


class Two(nn.Module):
    """Gives a product away, which its caller then changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = self.first(x)
        return product, self.second(torch.tanh(product))


@pytest.mark.parametrize(("mode", "room"), WAYS[1:], ids=ids[1:])
def test_results_that_the_caller_changes(mode: str, room: int | None) -> None:
    def run(model: nn.Module, context: contextlib.AbstractContextManager[Any], _step: int) -> Any:
        with context:
            x = torch.randn(8, 16).requires_grad_() * 1
            extra = x.sum()
            for block in model.children():
                product, x = block(x)
                extra = extra + product.mul_(0.3).sum()
            loss = x.square().mean() + extra
        loss.backward()
        return loss

    both(lambda: nn.ModuleList(Two() for _ in range(4)), run, mode, room)


def test_what_is_done_with_all_at_hand_does_not_keep_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block is kept, and asks for nothing: the inputs of the one before it are fetched meanwhile."""

    def inputs_away(profiles: list[BlockProfile], _means: Means) -> ActivationPlan:
        blocks = [RECOMPUTE_FROM_RAM] * (len(profiles) - 1)
        return ActivationPlan(blocks=[*blocks, KEEP], reason="", way_bytes=[MiB] * (len(profiles) + 1))

    monkeypatch.setattr(planning, "recompute", inputs_away)
    model = net(blocks=4)
    activations = opened(model, "auto", 0)
    stream = activations.saving._stream
    for step in range(5):
        stream.window_bytes = 0
        misses = stream.misses
        with activations:
            stream.window_bytes = 0  # all of it leaves
            loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        if step >= 3:
            assert stream.misses == misses
    activations.close()


class Same(nn.Module):
    """Looks whether it is given one thing twice, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) if x is y else torch.sigmoid(self.linear(x) + y)


@pytest.mark.parametrize(("mode", "room"), WAYS[1:], ids=ids[1:])
def test_the_same_thing_given_twice(mode: str, room: int | None) -> None:
    def run(model: nn.Module, context: contextlib.AbstractContextManager[Any], _step: int) -> Any:
        with context:
            x = torch.randn(8, 16)
            for block in model.children():
                x = block(x, x)
            loss = x.square().mean()
        loss.backward()
        return loss

    both(lambda: nn.ModuleList(Same() for _ in range(4)), run, mode, room)


def test_a_block_that_is_measured_while_it_leaves_shows_the_same() -> None:
    """What has left makes way: other tensors are then saved at the same addresses."""
    known = []
    for room in (10**9, -1):
        torch.manual_seed(0)
        model = nn.Sequential(*(ChainBlock(64) for _ in range(4)))
        activations = opened(model, "auto", room, seed=None, vram=100_000)
        for _ in range(3):
            with activations:
                loss = model(torch.randn(64, 64)).square().mean()
            loss.backward()
        saving = activations.saving
        profiles = saving.known.of(saving._last_sequence)
        assert profiles is not None
        known.append([(profile.saved_bytes, profile.input_bytes) for profile in profiles])
        assert len(set(saving._last_sequence)) == 2  # the first block's input needs no gradient
        activations.close()
    assert known[1] == known[0]
