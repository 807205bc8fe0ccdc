"""Law: whatever a user reads is right and whatever he writes takes effect, at any point, as in plain PyTorch."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import stormtorch as storm
from stormtorch.streams.bridge import handlers
from stormtorch.streams.bridge.torch_private import FUNCTION_BASE

from .models import (
    CHAIN,
    MAX_NORM,
    OTHERS,
    VOCABULARY,
    WIDTH,
    Case,
    Chain,
    Pair,
    Side,
    adamw,
    frozen,
    gradients,
    one_thread,  # noqa: F401  # a fixture
    same,
    stream,
    tight,
    tokens,
)

LORA = next(case for case in OTHERS if case.name == "lora")
CONV = next(case for case in OTHERS if case.name == "conv")
FAR = "blocks.6.up.weight"  # a parameter in the middle of what moves


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model, fused=True)


@pytest.fixture(params=[0, 99], ids=["", "kept"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """With states at home, and kept on the device: user code must not see the difference."""
    with Pair(CHAIN, fused, step="forward", kept=request.param) as made:
        yield made


# ---------------------------------------------------------------------------------------------------------- reading

READS: dict[str, Callable[[Side], object]] = {
    "parameter": lambda side: [parameter.detach().clone() for parameter in side.model.parameters()],
    "data": lambda side: [parameter.data for parameter in side.model.parameters()],
    "grad": lambda side: [parameter.grad for parameter in side.model.parameters()],
    "state_dict": lambda side: side.model.state_dict(),
    "optimizer": lambda side: side.optimizer.state_dict(),
    "state": lambda side: [dict(side.optimizer.state[parameter]) for parameter in side.model.parameters()],
    "arithmetic": lambda side: [side.named(FAR) * 2 + 1, side.named(FAR)[3, 5], side.named(FAR).t() @ side.named(FAR)],
    "numpy": lambda side: torch.from_numpy(side.named(FAR).detach().cpu().numpy().copy()),
    "item": lambda side: [side.named(FAR).norm().item(), side.named("head.bias")[0].item(), side.named(FAR).tolist()],
    "repr": lambda side: re.findall(r"-?\d+\.\d+", str(side.named("head.bias").data)),
    "clone": lambda side: copy.deepcopy(side.named(FAR)),
    "vector": lambda side: nn.utils.parameters_to_vector(side.model.parameters()),
    "stack": lambda side: torch.stack([side.named(f"blocks.{index}.norm.weight") for index in range(8)]),
    "out": lambda side: torch.add(side.named(FAR), 1, out=torch.empty(64, 32)),
    "foreach": lambda side: torch._foreach_norm(list(side.model.parameters())),
}


@pytest.mark.parametrize("read", READS)
def test_reading_right_after_step(pair: Pair, read: str) -> None:
    for step in range(3):
        pair.steps(1, start=step)
        with torch.no_grad():
            pair.both(READS[read], f"{read} after step {step}")
    pair.check()


@pytest.mark.parametrize("read", ["grad", "parameter", "state"])
def test_reading_right_after_backward(pair: Pair, read: str) -> None:
    for step in range(3):
        pair.both(lambda side, step=step: [side.optimizer.zero_grad(), side.loss(step).backward()][1])  # type: ignore[misc]
        with torch.no_grad():
            pair.both(READS[read], f"{read} after backward {step}")
        pair.both(lambda side: side.optimizer.step())
    pair.check()


def test_a_reference_taken_before_is_the_parameter_still(pair: Pair) -> None:
    held = pair.both(lambda side: (side.named(FAR), side.named("head.bias")))
    pair.steps(2)
    assert held[0] is pair.streamed.named(FAR)
    same(held[0], pair.plain.named(FAR), FAR)
    same(held[1], pair.plain.named("head.bias"), "head.bias")


# ---------------------------------------------------------------------------------------------------------- writing


def edit_data(side: Side) -> None:
    side.named(FAR).data.mul_(0.5)
    side.named("embed.weight").data[3] = 0.25


def edit_in_place(side: Side) -> None:
    with torch.no_grad():
        side.named(FAR).copy_(torch.full((64, 32), 0.01))
        side.named("head.bias").add_(1.0)
        side.named("head.weight")[2:5].zero_()


def replace_data(side: Side) -> None:
    parameter = side.named(FAR)
    parameter.data = torch.linspace(-0.1, 0.1, parameter.numel(), device=parameter.device).view_as(parameter)


def initialise(side: Side) -> None:
    nn.init.orthogonal_(side.named(FAR))
    nn.init.zeros_(side.named("blocks.2.down.bias"))


def load_all(side: Side) -> None:
    torch.manual_seed(7)
    side.model.load_state_dict(Chain().state_dict())


def load_some(side: Side) -> None:
    side.model.get_submodule("blocks.4").load_state_dict(Chain().blocks[0].state_dict())


def load_vector(side: Side) -> None:
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(side.model.parameters()).detach() * 0.9, side.model.parameters()
    )


def foreach(side: Side) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(side.model.parameters()), 0.9)


def out(side: Side) -> None:
    with torch.no_grad():
        torch.mul(side.named(FAR), 0.5, out=side.named(FAR))


def functional_in_place(side: Side) -> None:
    with torch.no_grad():
        functional.relu(side.named(FAR), inplace=True)
        functional.hardtanh(side.named("head.weight"), -0.1, 0.1, True)
        functional.dropout(side.named("blocks.2.norm.bias"), 0.5, True, True)


def renormalise(side: Side) -> None:
    """What embeddings with ``max_norm`` do to their weight."""
    functional.embedding(torch.arange(8, device=side.device), side.named("embed.weight").detach(), max_norm=0.1)
    functional.embedding(torch.arange(9, device=side.device), side.named("head.weight").data, None, 0.1)


def operators(side: Side) -> None:
    with torch.no_grad():
        torch.ops.aten.mul_.Tensor(side.named(FAR), torch.tensor(0.5, device=side.device))
        torch.ops.aten.add_(side.named("head.bias"), 1.0)


def set_memory(side: Side) -> None:
    with torch.no_grad():
        parameter = side.named(FAR)
        parameter.set_(torch.full((64, 32), 0.01, device=parameter.device))  # type: ignore[call-overload]


WRITES = [
    edit_data,
    edit_in_place,
    replace_data,
    initialise,
    load_all,
    load_some,
    load_vector,
    foreach,
    out,
    functional_in_place,
    renormalise,
    operators,
    set_memory,
]
MOMENTS = ["after step", "after forward", "after backward", "before everything"]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("moment", MOMENTS)
def test_writing_takes_effect(pair: Pair, write: Callable[[Side], None], moment: str) -> None:
    """Also where device copies of the old numbers are still about."""
    if moment == "before everything":
        pair.both(write)
    for step in range(3):

        def run(side: Side, step: int = step) -> object:
            side.optimizer.zero_grad()
            loss = side.loss(step)
            if moment == "after forward":
                with torch.no_grad():
                    side.loss(step + 100)  # the graph of this one is not kept: writing now is legal
                loss = side.loss(step) if write(side) is None else loss  # type: ignore[func-returns-value]
            loss.backward()
            if moment == "after backward":
                write(side)
            side.optimizer.step()
            if moment == "after step":
                write(side)
            return loss

        pair.both(run, f"step {step}")
    pair.check()


def test_ema_swapped_in_and_out(pair: Pair) -> None:
    averages: dict[int, dict[str, torch.Tensor]] = {}

    def run(side: Side, step: int) -> object:
        loss = side.step(step)
        average = averages.setdefault(id(side), frozen(side.model.state_dict()))
        for name, parameter in side.model.named_parameters():
            average[name].lerp_(parameter.detach().cpu(), 0.1)
        kept = frozen(side.model.state_dict())
        side.model.load_state_dict(average)
        with torch.no_grad():
            judged = side.loss(99)
        side.model.load_state_dict(kept)
        return loss, judged

    for step in range(3):
        pair.both(lambda side, step=step: run(side, step), f"step {step}")  # type: ignore[misc]
    pair.check()


@pytest.mark.parametrize("restored_by", ["data", "set", "copy"])
def test_ema_swapped_in_and_out_by_data(pair: Pair, restored_by: str) -> None:
    """The usual class: what was taken by ``p.data`` is the trained weight, not a window on what is there now."""
    shadows: dict[int, dict[str, torch.Tensor]] = {}

    def run(side: Side, step: int) -> object:
        loss = side.step(step)
        shadow = shadows.setdefault(
            id(side), {name: parameter.detach().clone() for name, parameter in side.model.named_parameters()}
        )
        backup, parts = {}, {}
        for name, parameter in side.model.named_parameters():
            shadow[name].lerp_(parameter.data, 0.1)
            backup[name], parts[name] = parameter.data, parameter.detach().view(-1)[1::2]
            parameter.data = shadow[name]
        with torch.no_grad():
            judged = side.loss(99)
        seen = frozen([judged, backup, parts])
        for name, parameter in side.model.named_parameters():
            if restored_by == "data":
                parameter.data = backup[name]
            elif restored_by == "set":
                with torch.no_grad():
                    parameter.set_(backup[name])  # type: ignore[call-overload]
            else:
                parameter.data = backup[name].clone()
        if restored_by != "copy":
            backup[FAR].mul_(0.5)  # the parameter's memory again
            parts["embed.weight"].zero_()
        return loss, seen, backup, parts

    for step in range(3):
        pair.both(lambda side, step=step: run(side, step), f"step {step}")  # type: ignore[misc]
    pair.check()


def test_views_that_are_held_see_writes_and_not_replacements(pair: Pair) -> None:
    held: dict[int, list[torch.Tensor]] = {}

    def run(side: Side, step: int) -> object:
        parameter = side.named(FAR)
        views = held.setdefault(id(side), [parameter.data, parameter.data.t(), parameter.detach()[3]])
        side.step(step)
        parameter.data.mul_(0.5)
        views[1][5] += 1.0
        seen = frozen(views)
        if step == 1:
            parameter.data = parameter.data  # the same memory
        if step == 2:
            parameter.data = torch.full_like(parameter, 0.01)
        if step == 3:
            views.append(parameter.data)
            parameter.data = parameter.data.flip(0)
        views[0].add_(0.25)
        return seen, views

    for step in range(5):
        pair.both(lambda side, step=step: run(side, step), f"step {step}")  # type: ignore[misc]
    pair.check()


def test_a_square_parameter_turned_by_its_own_view() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))]
    models.append(copy.deepcopy(models[0]))
    with storm.stream(models[0], device="cpu"):
        for model in models:
            weight = model.get_parameter("0.weight")
            weight.data = weight.data.t()
        same(models[0](torch.eye(8)), models[1](torch.eye(8)), "answer")


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu()


def test_parametrizations_come_and_go() -> None:
    """They move the parameter to another module, under another name, and give it other values by ``set_``."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCABULARY, 32), *(nn.Linear(32, 32) for _ in range(6)))

    def begin(side: Side) -> None:
        nn.utils.parametrize.register_parametrization(side.model.get_submodule("2"), "weight", Symmetric())

    def change(side: Side) -> None:
        nn.utils.parametrize.remove_parametrizations(side.model.get_submodule("2"), "weight")
        nn.utils.parametrize.register_parametrization(side.model.get_submodule("4"), "weight", Symmetric())

    with Pair(dataclasses.replace(CHAIN, make=model), fused, before=begin) as pair:
        pair.steps(2)
        pair.both(change)
        pair.steps(3, start=2)
        pair.check()


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.set_(torch.zeros(3)),
        lambda p: p.set_(),
        lambda p: p.set_(torch.zeros(64, 32).untyped_storage(), 0, (64, 32)),
        lambda p: p.resize_(3),
        lambda p: p.t_(),
        lambda p: p.unsqueeze_(0),
        lambda p: torch.utils.swap_tensors(p, nn.Parameter(torch.zeros(64, 32))),
        lambda p: p.share_memory_(),
        lambda p: p.detach().share_memory_(),
        lambda p: p.data[:3].share_memory_(),
    ],
    ids=[
        "set",
        "set-empty",
        "set-storage",
        "resize",
        "t",
        "unsqueeze",
        "swap",
        "share",
        "share-detached",
        "share-part",
    ],
)
def test_a_parameter_that_would_leave_its_memory_is_refused_in_words(
    pair: Pair, change: Callable[[Any], object]
) -> None:
    pair.steps(1)
    with torch.no_grad(), pytest.raises((storm.StormError, TypeError), match=rf"{FAR}.*[Cc]lose the session"):
        change(pair.streamed.named(FAR))
    pair.steps(2, start=1)
    pair.check()


@pytest.mark.parametrize(
    "of",
    [
        lambda pair: pair.streamed.model,
        lambda pair: pair.streamed.named(FAR).grad,
        lambda pair: pair.streamed.optimizer.state[pair.streamed.named(FAR)]["exp_avg"],
    ],
    ids=["model", "gradient", "state"],
)
def test_home_memory_is_not_shared_with_other_processes(pair: Pair, of: Callable[[Pair], Any]) -> None:
    """torch would free it under our feet."""
    pair.steps(1)
    pair.both(lambda side: side.loss(1).backward())
    found = of(pair)
    with pytest.raises(storm.StormError, match="Share a copy"):
        found.share_memory() if isinstance(found, nn.Module) else found.share_memory_()
    pair.both(lambda side: side.optimizer.step())
    pair.steps(2, start=2)
    pair.check()


def test_gradients_are_zeroed_as_loops_once_did(pair: Pair) -> None:
    def zero(side: Side) -> None:
        for parameter in side.model.parameters():
            if (grad := parameter.grad) is not None:
                assert grad.detach_() is grad
                grad.zero_()

    for number in range(3):
        pair.both(zero)
        pair.both(lambda side, number=number: side.loss(number).backward())  # type: ignore[misc]
        pair.both(lambda side: side.optimizer.step())
    pair.check()


class Writing(Chain):
    """A root that changes weights in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))  # the root's own: a unit that is in use while the root runs
        self.write: Callable[[Writing], object] = lambda _: None

    def forward(self, tokens: torch.Tensor, order: Any = None) -> torch.Tensor:
        with torch.no_grad():
            self.write(self)
        x = super().forward(tokens, order)
        return x * self.scale.sum() * self.embed.weight.detach().mean()


def normalise(model: Writing) -> None:
    model.head.weight.copy_(functional.normalize(model.head.weight, dim=1))


def clamp(model: Writing) -> None:
    for parameter in model.blocks.parameters():
        parameter.clamp_(-0.1, 0.1)


def set_row(model: Writing) -> None:
    model.embed.weight[3] = 0.25
    model.head.weight[2:5] = model.embed.weight[2:5]


def replace_in_forward(model: Writing) -> None:
    model.head.weight.data = model.head.weight.flip(0)


def add_up(model: Writing) -> None:
    torch.add(model.head.weight, model.embed.weight, alpha=0.01, out=model.head.weight)
    torch._foreach_mul_([model.get_parameter(f"blocks.{index}.norm.weight") for index in range(8)], 0.9)


def rectify(model: Writing) -> None:
    functional.relu(model.head.bias, inplace=True)


@pytest.mark.parametrize(
    "write", [normalise, clamp, set_row, replace_in_forward, add_up, rectify], ids=lambda write: write.__name__
)
@pytest.mark.parametrize("moment", ["forward", "hook", "evaluated"])
def test_a_root_that_writes_weights_in_its_forward(write: Callable[[Writing], None], moment: str) -> None:
    """It goes on with what it has written, and so does training."""

    def begin(side: Side) -> None:
        assert isinstance(side.model, Writing)
        if moment == "hook":
            side.model.register_forward_pre_hook(lambda model, _: [torch.no_grad()(write)(model), None][1])
        else:
            side.model.write = write

    for vram in ("tight", "auto"):
        with Pair(dataclasses.replace(CHAIN, make=Writing), fused, vram=vram, seed=0) as pair:
            pair.both(begin)
            for step in range(3):
                if moment == "evaluated":
                    with torch.no_grad():
                        pair.both(lambda side, step=step: side.loss(step + 50))  # type: ignore[misc]
                pair.steps(1, start=step)
            pair.check()


def test_a_root_that_writes_a_weight_that_its_graph_needs_is_stopped() -> None:
    """As plain PyTorch stops it."""

    def run(side: Side) -> None:
        loss = side.loss(0)
        with torch.no_grad():
            side.named("head.weight").mul_(0.5)
        with pytest.raises(RuntimeError, match=r"modified by an (optimizer step or an in-place|inplace) operation"):
            loss.backward()
        side.optimizer.zero_grad()

    with Pair(dataclasses.replace(CHAIN, make=Writing), fused) as pair:
        pair.both(run)
        pair.steps(2)


def after_many_that_are_gone(model: Writing) -> None:
    """What is written has the address, and so the id, of something that was read and is gone."""
    model.head.weight.sum()
    seen = {id(model.embed.weight.data) for _ in range(50)}
    for _ in range(50):
        data = model.head.weight.data
        if id(data) in seen:
            break
    data.mul_(0.5)


@pytest.mark.parametrize(
    "write",
    [
        lambda model: model.head.weight[3].zero_(),
        lambda model: model.head.weight.t().mul_(0.5),
        lambda model: model.head.weight.detach().mul_(0.5),
        lambda model: model.head.weight.data.mul_(0.5),
        lambda model: model.scale.mul_(0.5),
        after_many_that_are_gone,
    ],
    ids=["row", "t", "detach", "data", "own", "after many that are gone"],
)
@pytest.mark.parametrize("grad", [True, False], ids=["train", "evaluate"])
def test_writes_in_forward_that_would_be_lost_are_refused(write: Callable[[Writing], object], grad: bool) -> None:
    torch.manual_seed(0)
    model = Writing()
    with stream(model), torch.set_grad_enabled(grad):
        before = frozen(model.state_dict())
        model.write = write
        with pytest.raises(storm.StormError, match=r"would be lost.*leave="):
            model(tokens(0)[0])
        model.write = lambda _: None
        model(tokens(0)[0])
        same(frozen(model.state_dict()), before, "weights")


class Opponents(nn.Module):
    """Two networks with losses of their own, in one forward: one is frozen for a while, as GANs do, or thawed."""

    def __init__(self, begins_frozen: bool) -> None:
        super().__init__()
        self.maker = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.judge = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.begins_frozen = begins_frozen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.maker(x)
        self.judge.requires_grad_(not self.begins_frozen)
        judged = self.judge(made.detach() if not self.begins_frozen else made).square().mean()
        self.judge.requires_grad_(self.begins_frozen)
        again = self.judge(made if not self.begins_frozen else made.detach()).mean()
        self.judge.requires_grad_(True)
        loss: torch.Tensor = judged - again
        return loss


@pytest.mark.parametrize("begins_frozen", [False, True], ids=["frozen", "thawed"])
@pytest.mark.parametrize("vram", ["tight", "auto"])
def test_weights_that_are_frozen_or_thawed_within_a_forward(begins_frozen: bool, vram: str) -> None:
    def vectors(step: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)),)

    case = Case("opponents", lambda: Opponents(begins_frozen), vectors, lambda model, batch: model(batch[0]))
    with Pair(case, fused, vram=vram, seed=0) as pair:
        for step in range(3):
            pair.both(lambda side, step=step: (side.step(step), gradients(side.model)), "gradients")  # type: ignore[misc]
        pair.check()


def test_a_second_thread_inside_of_the_model_is_refused(pair: Pair) -> None:
    """What stands in modules is one thread's. Threads that take turns are as one."""
    model = pair.streamed.model
    said: list[str] = []

    def evaluate() -> None:
        try:
            with torch.no_grad():
                pair.streamed.loss(7)
        except storm.StormError as error:
            said.append(str(error))

    def in_another_thread(*_: object) -> None:
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join(300)

    handle = model.get_submodule("blocks.3").register_forward_hook(in_another_thread)
    pair.steps(1)
    handle.remove()
    assert len(said) == 1
    assert "one call at a time" in said[0]
    in_another_thread()
    assert len(said) == 1
    pair.steps(2, start=1)
    pair.check()


def test_averaged_model_of_torch(pair: Pair) -> None:
    averaged = {id(side): torch.optim.swa_utils.AveragedModel(side.model) for side in (pair.plain, pair.streamed)}
    for step in range(3):
        pair.steps(1, start=step)
        pair.both(lambda side: averaged[id(side)].update_parameters(side.model))
    pair.both(lambda side: averaged[id(side)].state_dict(), "average")


def scale_gradients(side: Side) -> None:
    for parameter in side.model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def assign_gradient(side: Side) -> None:
    side.named(FAR).grad = torch.ones_like(side.named(FAR))


def drop_gradient(side: Side) -> None:
    side.named(FAR).grad = None


def edit_gradient_data(side: Side) -> None:
    gradient = side.named(FAR).grad
    assert gradient is not None
    gradient.data[5:9] = 0.0
    gradient.clamp_(-1e-3, 1e-3)


def clip_value(side: Side) -> None:
    nn.utils.clip_grad_value_(side.model.parameters(), 1e-3)


def clip_some(side: Side) -> None:
    nn.utils.clip_grad_norm_(side.model.get_submodule("blocks").parameters(), 1e-2)


def noise(side: Side) -> None:
    for parameter in side.model.parameters():
        assert parameter.grad is not None
        parameter.grad += 1e-3 * torch.randn(parameter.grad.shape, device=parameter.grad.device)


@pytest.mark.parametrize(
    "edit",
    [scale_gradients, assign_gradient, drop_gradient, edit_gradient_data, clip_value, clip_some, noise],
    ids=lambda edit: edit.__name__,
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_editing_gradients_takes_effect(pair: Pair, edit: Callable[[Side], None], accumulate: int) -> None:
    def run(side: Side, step: int) -> object:
        for part in range(accumulate):
            side.loss(step * accumulate + part).backward()
            edit(side)
        side.optimizer.step()
        seen = gradients(side.model)
        side.optimizer.zero_grad()
        return seen

    for step in range(3):
        pair.both(lambda side, step=step: run(side, step), f"gradients of step {step}")  # type: ignore[misc]
    pair.check()


def test_editing_optimizer_state_takes_effect(pair: Pair) -> None:
    def damp(side: Side) -> None:
        for state in side.optimizer.state.values():
            state["exp_avg"].mul_(0.5)

    for step in range(3):
        pair.steps(1, start=step)
        pair.both(damp)
    pair.check()


# ------------------------------------------------------------------------------------------------------------ hooks


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("register_hook", "serial"),
        ("register_hook", "forward"),
        ("register_hook", "backward"),
        ("register_post_accumulate_grad_hook", "serial"),
        ("register_post_accumulate_grad_hook", "forward"),
    ],
)
def test_hooks_of_parameters_fire_and_change_gradients(kind: str, when: str, step: str) -> None:
    fired: list[str] = []

    def hook(side: Side) -> None:
        def on_gradient(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda gradient: [fired.append(f"{side.session is None} {name}"), gradient * 0.5][1]  # type: ignore[func-returns-value,return-value]

        def on_parameter(name: str) -> Callable[[torch.Tensor], None]:
            def run(parameter: torch.Tensor) -> None:
                fired.append(f"{side.session is None} {name}")
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)

            return run

        for name in (FAR, "head.bias", "embed.weight"):
            getattr(side.named(name), kind)((on_gradient if kind == "register_hook" else on_parameter)(name))

    with Pair(CHAIN, fused, step=step, before=hook if when == "before" else None) as pair:
        if when == "after":
            hook(pair.plain)
            hook(pair.streamed)
        pair.steps(3)
        pair.check(grads=step != "backward")
        expected = 9 * (1 if when == "after" else 2)
        assert len(fired) == 18
        assert when == "before" or len([text for text in fired if text.startswith("False")]) == expected


def test_hooks_of_modules_and_their_removal(pair: Pair) -> None:
    seen: dict[int, list[float]] = {id(pair.plain): [], id(pair.streamed): []}

    def run(side: Side) -> object:
        block = side.model.get_submodule("blocks.3")
        heard = seen[id(side)]

        def slope(_module: nn.Module, _given: Any, taken: Any) -> None:
            heard.append(taken[0].sum().item())

        handles = [
            block.register_forward_pre_hook(lambda module, _: heard.append(module.up.weight.sum().item())),
            block.register_forward_hook(lambda _module, _args, result: result * 1.5),
            block.register_full_backward_hook(slope),
        ]
        loss = side.step(0)
        for handle in handles:
            handle.remove()
        return loss, side.step(1), list(heard)

    pair.both(run)
    pair.check()


def test_hooks_of_the_optimizer(pair: Pair) -> None:
    def run(side: Side) -> object:
        heard: list[torch.Tensor] = []

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            del optimizer, args, kwargs
            gradient = side.named(FAR).grad
            assert gradient is not None
            gradient.mul_(2)

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            del optimizer, args, kwargs
            heard.append(side.named(FAR).detach().clone())

        handles = [side.optimizer.register_step_pre_hook(before), side.optimizer.register_step_post_hook(after)]
        losses = [side.step(step) for step in range(3)]
        for handle in handles:
            handle.remove()
        return losses, heard

    pair.both(run)
    pair.check()


def test_a_hook_that_replaces_the_closure(pair: Pair) -> None:
    """What hooks are given, and what they may return, is as with torch."""

    def run(side: Side) -> object:
        heard: list[object] = []

        def closure() -> torch.Tensor:
            side.optimizer.zero_grad()
            loss = side.loss(0)
            loss.backward()
            return loss

        def twice() -> torch.Tensor:
            return 2 * closure().detach()

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            heard.append((args[0] is optimizer, len(args), sorted(kwargs)))
            return (optimizer, twice), {}

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            heard.append((args == (optimizer, twice), kwargs))

        optimizer: Any = side.optimizer
        handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        losses = [optimizer.step(closure), optimizer.step(closure=closure)]
        for handle in handles:
            handle.remove()
        with pytest.raises(TypeError):
            optimizer.step(closure, 1)
        return losses, heard

    pair.both(run)
    pair.check()


def test_a_regulariser_outside_the_forward(pair: Pair) -> None:
    """Its gradient reaches the parameters by a way that does not lead through their modules."""

    def run(side: Side, step: int) -> object:
        side.optimizer.zero_grad()
        penalty = sum((parameter.square().sum() for parameter in side.model.parameters()), torch.zeros(()))
        loss = side.loss(step) + 1e-3 * penalty.to(side.device)
        loss.backward()
        seen = gradients(side.model) if step else None
        side.optimizer.step()
        return loss, seen

    for step in range(3):
        pair.both(lambda side, step=step: run(side, step), f"step {step}")  # type: ignore[misc]
    pair.check()


def test_a_regulariser_alone(pair: Pair) -> None:
    def run(side: Side) -> object:
        side.optimizer.zero_grad()
        side.named(FAR).square().sum().backward()
        seen = gradients(side.model)
        side.optimizer.step()
        return seen

    pair.steps(1)
    pair.both(run)
    pair.steps(1, start=1)
    pair.check()


# ------------------------------------------------------------------------------------------------------------ saving


def test_saved_weights_load_anywhere(pair: Pair) -> None:
    pair.steps(2)
    file = io.BytesIO()
    torch.save(pair.streamed.model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(type(tensor) is torch.Tensor for tensor in loaded.values())
    other = Chain()
    other.load_state_dict(loaded)
    same(other.state_dict(), pair.plain.model.state_dict(), "state_dict")
    pair.steps(1, start=2)
    same(loaded, other.state_dict(), "what was saved, after one more step")


def test_a_saved_model_does_not_take_the_whole_image_along(pair: Pair) -> None:
    file = io.BytesIO()
    torch.save(pair.streamed.model.state_dict(), file)
    plain = io.BytesIO()
    torch.save(pair.plain.model.state_dict(), plain)
    assert len(file.getvalue()) < 1.5 * len(plain.getvalue())


def test_a_deep_copy_is_ordinary_and_independent(pair: Pair) -> None:
    pair.steps(2)
    other = copy.deepcopy(pair.streamed.model)
    assert all(type(parameter) is nn.Parameter for parameter in other.parameters())
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in other.parameters())
    same(frozen(other.state_dict()), frozen(pair.plain.model.state_dict()), "copy")
    kept = frozen(other.state_dict())
    pair.steps(1, start=2)
    same(frozen(other.state_dict()), kept, "copy, after one more step of the original")
    side = Side(other, fused(other), CHAIN, torch.device("cpu"))
    twin = Side(copy.deepcopy(pair.plain.model), fused(pair.plain.model), CHAIN, torch.device("cpu"))
    twin.model.load_state_dict(kept)
    twin.optimizer = fused(twin.model)
    for step in range(2):
        same(side.step(step), twin.step(step), "loss of the copy")
    same(other.state_dict(), twin.model.state_dict(), "copy, trained on its own")
    pair.check()


def test_the_optimizer_has_torchs_own_format(pair: Pair) -> None:
    pair.steps(2)
    saved = copy.deepcopy(pair.streamed.optimizer.state_dict())
    same(frozen(saved), frozen(pair.plain.optimizer.state_dict()), "optimizer")  # keys, shapes and dtypes too
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    twin = copy.deepcopy(pair.plain.model)
    other = Side(twin, fused(twin), CHAIN, torch.device("cpu"))
    other.optimizer.load_state_dict(torch.load(file, weights_only=True))
    pair.steps(2, start=2)
    for step in range(2, 4):
        other.step(step)
    same(other.model.state_dict(), pair.streamed.model.state_dict(), "a plain run from the saved states")


@pytest.mark.parametrize("source", ["plain", "streamed"])
def test_loading_optimizer_states_continues_exactly(pair: Pair, source: str) -> None:
    pair.steps(2)
    kept = {
        id(side): (frozen(side.model.state_dict()), copy.deepcopy(side.optimizer.state_dict()))
        for side in (pair.plain, pair.streamed)
    }
    first = [pair.both(lambda side, step=step: side.step(step)) for step in (2, 3)]  # type: ignore[misc]

    def restore(side: Side) -> None:
        weights, states = kept[id(getattr(pair, source))]
        side.model.load_state_dict(weights)
        side.optimizer.load_state_dict(copy.deepcopy(states))

    pair.both(restore)
    again = [pair.both(lambda side, step=step: side.step(step)) for step in (2, 3)]  # type: ignore[misc]
    same(again, first, "losses of the run continued")
    pair.check()


# ---------------------------------------------------------------------------------------------------- the optimizer


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers(when: str) -> None:
    """One built before has already patched ``optimizer.step`` on the instance."""
    schedulers: dict[int, Any] = {}

    def schedule(side: Side) -> None:
        warm = torch.optim.lr_scheduler.LinearLR(side.optimizer, 0.1, total_iters=2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(side.optimizer, 6)
        schedulers[id(side)] = torch.optim.lr_scheduler.SequentialLR(side.optimizer, [warm, cosine], [2])

    def run(side: Side, step: int) -> object:
        loss = side.step(step)
        schedulers[id(side)].step()
        return loss, schedulers[id(side)].get_last_lr()

    with Pair(CHAIN, fused, before=schedule if when == "before" else None) as pair:
        if when == "after":
            schedule(pair.plain)
            schedule(pair.streamed)
        for step in range(5):
            pair.both(lambda side, step=step: run(side, step), f"step {step}")  # type: ignore[misc]
        pair.check()


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """As everybody does: no decay for vectors, a smaller rate for the embedding."""
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in named.items() if p.ndim == 2 and n != "embed.weight"], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0, "betas": (0.8, 0.9)},
        {"params": [named["embed.weight"]], "lr": 1e-3},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


@pytest.mark.parametrize("step", ["serial", "forward", "backward"])
def test_parameter_groups(step: str) -> None:
    with Pair(CHAIN, grouped, step=step) as pair:
        pair.steps(4)
        pair.check(grads=step != "backward")


@pytest.mark.parametrize("step", ["serial", "forward", "backward"])
def test_settings_changed_on_the_way(step: str) -> None:
    def change(side: Side) -> None:
        side.optimizer.param_groups[0]["lr"] *= 0.1
        side.optimizer.param_groups[1]["weight_decay"] = 0.3
        side.optimizer.param_groups[2]["betas"] = (0.5, 0.6)

    with Pair(CHAIN, grouped, step=step) as pair:
        pair.steps(2)
        pair.both(change)
        pair.steps(2, start=2)
        pair.check(grads=step != "backward")


def test_a_group_added_later_works_or_is_refused_in_words() -> None:
    def without_head(model: nn.Module) -> torch.optim.Optimizer:
        return adamw_of([p for n, p in model.named_parameters() if not n.startswith("head")])

    def adamw_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, fused=True)

    with Pair(CHAIN, without_head) as pair:
        pair.steps(2)
        group = {"params": list(pair.streamed.model.get_submodule("head").parameters()), "lr": 1e-3}
        try:
            pair.streamed.optimizer.add_param_group(group)
        except storm.StormError as error:
            assert "add_param_group" in str(error) or "close" in str(error)  # noqa: PT017
        else:
            plain = {"params": list(pair.plain.model.get_submodule("head").parameters()), "lr": 1e-3}
            pair.plain.optimizer.add_param_group(plain)
        pair.steps(2, start=2)
        pair.check()


def test_parameters_that_no_optimizer_has() -> None:
    """They collect gradients and stay as they are."""

    def some(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.get_submodule("blocks").parameters(), lr=1e-2, fused=True)

    with Pair(CHAIN, some) as pair:
        pair.steps(3)
        pair.check()
        pair.both(lambda side: side.model.zero_grad())
        pair.check()


@pytest.mark.parametrize("owner", ["optimizer", "model"])
@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("moment", ["end", "start", "twice", "never"])
def test_zero_grad(pair: Pair, owner: str, to_none: bool, moment: str) -> None:
    def run(side: Side, step: int) -> object:
        def clear() -> None:
            getattr(side, owner).zero_grad(set_to_none=to_none)

        if moment in ("start", "twice"):
            clear()
        loss = side.loss(step)
        if moment == "twice":
            clear()
        loss.backward()
        side.optimizer.step()
        if moment == "end":
            clear()
        return loss, gradients(side.model) if step % 2 else None

    for step in range(4):
        pair.both(lambda side, step=step: run(side, step), f"step {step}")  # type: ignore[misc]
    pair.check()


def test_gradients_dropped_before_the_step(pair: Pair) -> None:
    """A step without gradients changes nothing."""
    pair.steps(1)
    pair.both(lambda side: [side.loss(1).backward(), side.optimizer.zero_grad(), side.optimizer.step()][1])
    pair.check()
    pair.steps(1, start=2)
    pair.check()


def test_two_steps_on_one_gradient(pair: Pair) -> None:
    pair.both(lambda side: [side.loss(0).backward(), side.optimizer.step(), side.optimizer.step()][1])
    pair.check()


def clip(side: Side) -> torch.Tensor:
    """All gradients, on the streamed side in the session's own way, which scales them later."""
    if side.session is not None:
        return side.session.clip_grad_norm_(MAX_NORM)
    return nn.utils.clip_grad_norm_(side.model.parameters(), MAX_NORM)


def zero_by_model(side: Side) -> None:
    side.model.zero_grad()


def zero_by_optimizer(side: Side) -> None:
    side.optimizer.zero_grad()


@pytest.mark.parametrize("zero", [zero_by_model, zero_by_optimizer], ids=["model", "optimizer"])
def test_gradients_that_are_held_become_clipped_and_stay(pair: Pair, zero: Callable[[Side], None]) -> None:
    def run(side: Side, step: int) -> object:
        side.loss(step).backward()
        held = [parameter.grad for parameter in side.model.parameters()]
        norm = clip(side)
        side.optimizer.step()
        zero(side)
        return norm, held

    for step in range(3):
        pair.both(lambda side, step=step: run(side, step), f"gradients of step {step}")  # type: ignore[misc]
    pair.check()


def test_gradients_of_another_loss_after_clipping(pair: Pair) -> None:
    """Torch itself adds those of parameters that are used outside of the model: they are not clipped."""

    def run(side: Side, step: int) -> object:
        side.loss(step).backward()
        norm = clip(side)
        (side.named(FAR).square().sum() * 1e-2).backward()
        side.optimizer.step()
        seen = gradients(side.model)
        side.model.zero_grad()
        return norm, seen

    for step in range(3):
        pair.both(lambda side, step=step: run(side, step), f"gradients of step {step}")  # type: ignore[misc]
    pair.check()


@pytest.mark.parametrize("zero", [zero_by_model, zero_by_optimizer], ids=["model", "optimizer"])
def test_dropping_clipped_gradients_waits_for_nothing(
    pair: Pair, zero: Callable[[Side], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `Trainer` does after each step: the update, which is still to come or under way, must go on behind it."""
    side = pair.streamed
    assert pair.session._parts.adam is not None
    for step in range(3):
        side.loss(step).backward()
        clip(side)
        side.optimizer.step()
        with monkeypatch.context() as patch:
            for name in ("join", "join_states", "finish", "apply_factor"):
                patch.setattr(pair.session._parts.adam, name, None)  # a call of it fails
            zero(side)
        assert all(parameter.grad is None for parameter in side.model.parameters())


@pytest.mark.parametrize("flags", [{"fused": True}, {}], ids=["fused", "default"])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscaled"])
def test_grad_scaler(flags: dict[str, bool], unscale: bool) -> None:
    """With an overflow on the way: that step is left out, the scale goes down."""
    scalers: dict[int, torch.amp.GradScaler] = {}

    def run(side: Side, step: int) -> object:
        scaler = scalers.setdefault(id(side), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2))
        side.optimizer.zero_grad()
        loss = side.loss(step) * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(side.optimizer)
            nn.utils.clip_grad_norm_(side.model.parameters(), MAX_NORM)
        scaler.step(side.optimizer)
        scaler.update()
        return loss, scaler.get_scale()

    with Pair(CHAIN, lambda model: adamw(model, **flags)) as pair:
        for step in range(5):
            pair.both(lambda side, step=step: run(side, step), f"step {step}")  # type: ignore[misc]
        pair.check()


def test_frozen_parameters_get_no_gradient() -> None:
    with Pair(LORA, fused) as pair:
        before = {n: frozen(p) for n, p in pair.streamed.model.named_parameters() if not p.requires_grad}
        pair.steps(3)
        for name, value in before.items():
            assert pair.streamed.named(name).grad is None, name
            same(pair.streamed.named(name), value, name)
        pair.check()


def test_freezing_and_thawing_on_the_way(pair: Pair) -> None:
    def freeze(side: Side, frozen_now: bool) -> None:
        side.model.get_submodule("blocks.3").requires_grad_(not frozen_now)
        side.named("head.bias").requires_grad_(not frozen_now)

    for step, state in enumerate((False, True, True, False)):
        pair.both(lambda side, state=state: freeze(side, state))  # type: ignore[misc]
        pair.steps(1, start=step)
        pair.check()


def test_buffers_are_read_and_written() -> None:
    def reset(side: Side) -> None:
        buffer = side.model.get_buffer("body.4.norm.running_mean")
        buffer.fill_(0.5)

    with Pair(CONV, fused) as pair:
        pair.steps(2)
        pair.both(lambda side: list(side.model.buffers()), "buffers")
        pair.both(reset)
        pair.steps(2, start=2)
        pair.check()


# ------------------------------------------------------------------------------------------------ opening and closing


def test_the_objects_stay_what_they_were(pair: Pair) -> None:
    model, optimizer = pair.streamed.model, pair.streamed.optimizer
    pair.steps(1)
    assert type(model) is Chain
    assert isinstance(optimizer, torch.optim.AdamW)
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in pair.plain.model.named_parameters()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in pair.plain.model.named_modules()]
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in model.parameters()}


@pytest.mark.parametrize("step", ["serial", "forward", "backward"])
def test_closed_on_the_way_it_goes_on_as_a_plain_run(step: str) -> None:
    with Pair(CHAIN, fused, step=step) as pair:
        pair.steps(3)
        pair.session.close()
        pair.check(grads=step != "backward")
        pair.steps(2, start=3)
        pair.check()
        for again in ("forward", "backward"):
            with stream(pair.streamed.model, pair.streamed.optimizer, step=again, seed=1):
                pair.steps(2, start=5)
            pair.check(grads=again != "backward")


def test_closed_between_backward_and_step(pair: Pair) -> None:
    pair.steps(1)
    pair.both(lambda side: [side.optimizer.zero_grad(), side.loss(1).backward()][1])
    pair.session.close()
    pair.both(lambda side: side.optimizer.step())
    pair.check()


def test_closed_twice_is_closed(pair: Pair) -> None:
    pair.steps(1)
    pair.session.close()
    pair.session.close()
    pair.check()


def test_streamed_twice_at_once_is_refused() -> None:
    with Pair(CHAIN, fused) as pair:
        with pytest.raises(storm.StormError, match=r"[Cc]lose"):
            stream(pair.streamed.model, pair.streamed.optimizer)
        pair.steps(2)
        pair.check()


def test_a_session_that_nobody_keeps_streams_on() -> None:
    gc.collect()
    others = handlers.state.sessions
    with Pair(CHAIN, fused) as pair:
        pair.session.close()
        stream(pair.streamed.model, pair.streamed.optimizer)
        gc.collect()
        assert handlers.state.sessions == others + 1
        with pytest.raises(storm.StormError, match=r"[Cc]lose"):
            stream(pair.streamed.model, pair.streamed.optimizer)
        pair.steps(2)
        pair.check()
    del pair
    gc.collect()
    assert "apply" not in vars(FUNCTION_BASE)  # torch is as it was
    assert handlers.state.sessions == others  # signal handlers are the user's own again


def test_a_session_begun_with_gradients_and_states_keeps_them() -> None:
    def begin(side: Side) -> None:
        side.step(0)
        side.optimizer.zero_grad()
        side.loss(1).backward()

    with Pair(CHAIN, fused, before=begin) as pair:
        pair.check()
        pair.both(lambda side: [side.loss(2).backward(), side.optimizer.step()][1])
        pair.steps(2, start=3)
        pair.check()


def test_two_sessions_side_by_side() -> None:
    """As in a game of two networks."""
    with Pair(CHAIN, fused) as one, Pair(CONV, fused) as two:
        for step in range(3):
            one.steps(1, start=step)
            two.steps(1, start=step)
        one.check()
        two.check()


def test_one_layer_alone() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    twin = copy.deepcopy(layer)
    session = storm.stream(layer, device="cpu")
    x = torch.randn(3, 8)
    same(layer(x), twin(x), "answer")
    for side in (layer, twin):
        side(x).square().sum().backward()
    same(gradients(layer), gradients(twin), "gradients")
    session.close()
    assert type(layer) is nn.Linear


def test_one_layer_inside_an_ordinary_model() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with storm.stream(models[0][2], device="cpu"):
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                functional.mse_loss(model(x), x).backward()
                optimizer.step()
            same(models[0].state_dict(), models[1].state_dict(), f"step {step}")


def test_the_public_call_takes_sizes_in_words() -> None:
    with Pair(CHAIN, fused) as pair:
        pair.session.close()
        budget = -(-tight(pair.streamed.model) // 1024)
        with storm.stream(
            pair.streamed.model, pair.streamed.optimizer, vram=f"{budget}KiB", ram="1GiB", device="cpu"
        ) as session:
            pair.steps(3)
            assert str(session.report())
        pair.check()
