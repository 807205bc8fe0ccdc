"""Law: whatever becomes of activations until backward, gradients and buffers are plain PyTorch's, bit for bit."""

from __future__ import annotations

import copy
import gc
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
from stormtorch.offload import OffloadedActivations
from stormtorch.streams.settings import Trial

from .models import (
    CHAIN,
    HUGGINGFACE,
    LLAMA,
    OTHERS,
    RECOMPUTED,
    Case,
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
@pytest.mark.timeout(300)
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
            measured = max(profile.input_bytes for profile in activations.saving._profiles.values() or [_Largest])
            assert measured == 64 * 16 * 4
    activations.close()


class _Largest:
    input_bytes = 64 * 16 * 4


def test_memory_is_flat_over_many_steps() -> None:
    model = net()
    activations = opened(model, "offload", seed=None)
    used = set()
    for step in range(200):
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


@pytest.mark.parametrize(("mode", "room"), WAYS[1:6], ids=ids[1:6])
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


@pytest.mark.parametrize(("mode", "room"), WAYS[1:6], ids=ids[1:6])
@pytest.mark.parametrize("case", [LLAMA, HUGGINGFACE], ids=lambda case: case.name)
def test_streamed_on_any_device(case: Case, mode: str, room: int | None, device: torch.device) -> None:
    with Pair(case, sgd, device=device, activations=mode, room=room) as pair:
        pair.steps(4)
        pair.check()
