"""Law: after whatever goes wrong the session is usable, its numbers are right, and an error says what to do."""

from __future__ import annotations

import gc
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import stormtorch as storm
from stormtorch.core.sizes import MiB
from stormtorch.core.tags import Tag, Tier

from ..resident import resident_bytes
from ..thinning import daily
from .models import (
    CHAIN,
    RECOMPUTED,
    Case,
    Pair,
    Side,
    adamw,
    gradients,
    one_thread,  # noqa: F401  # a fixture
    stream,
    tight,
)


class Broken(Exception):
    """What the user's own code raises."""


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        del ctx, grads
        raise Broken


def broken(*_: object) -> None:
    raise Broken


def interrupted(*_: object) -> None:
    signal.raise_signal(signal.SIGINT)


@contextmanager
def hooked(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def in_forward(side: Side, action: Callable[..., None]) -> None:
    with hooked(side.model.get_submodule("blocks.4").register_forward_pre_hook(action)):
        side.loss(100).backward()


def in_a_forward_hook(side: Side, action: Callable[..., None]) -> None:
    with hooked(side.model.get_submodule("blocks.4").register_forward_hook(action)):
        side.loss(100).backward()


def in_evaluation(side: Side, action: Callable[..., None]) -> None:
    inner = list(side.model.get_submodule("blocks.4").children())[-1]
    with torch.no_grad(), hooked(inner.register_forward_pre_hook(action)):
        side.loss(100)


def in_loss(side: Side, action: Callable[..., None]) -> None:
    loss = side.loss(100)
    action()
    loss.backward()


def in_backward(side: Side, _: Callable[..., None]) -> None:
    block = side.model.get_submodule("blocks.4")
    with hooked(block.register_forward_hook(lambda _module, _args, result: Breaks.apply(result))):  # type: ignore[no-untyped-call]
        side.loss(100).backward()


def in_a_hook_of_backward(side: Side, action: Callable[..., None]) -> None:
    with hooked(side.model.get_submodule("blocks.4").register_full_backward_hook(action)):
        side.loss(100).backward()


def in_a_hook_of_a_parameter(side: Side, action: Callable[..., None]) -> None:
    parameter = next(side.model.get_submodule("blocks.4").parameters())
    with hooked(parameter.register_hook(action)):
        side.loss(100).backward()


def in_a_hook_of_an_accumulated_parameter(side: Side, action: Callable[..., None]) -> None:
    parameter = next(side.model.get_submodule("blocks.4").parameters())
    with hooked(parameter.register_post_accumulate_grad_hook(action)):
        side.loss(100).backward()


def in_a_hook_of_the_optimizer(side: Side, action: Callable[..., None]) -> None:
    side.loss(100).backward()
    with hooked(side.optimizer.register_step_pre_hook(action)):
        side.optimizer.step()


PLACES = [
    in_forward,
    in_a_forward_hook,
    in_evaluation,
    in_loss,
    in_backward,
    in_a_hook_of_backward,
    in_a_hook_of_a_parameter,
    in_a_hook_of_an_accumulated_parameter,
    in_a_hook_of_the_optimizer,
]


def fails(
    place: Callable[[Side, Callable[..., None]], None], action: Callable[..., None], error: type[BaseException]
) -> Callable[[Side], None]:
    def run(side: Side) -> None:
        side.optimizer.zero_grad()
        with pytest.raises(error):
            place(side, action)

    return run


@pytest.mark.parametrize(
    ("case", "step"),
    [(CHAIN, "serial"), (CHAIN, "forward"), (RECOMPUTED, "forward")],
    ids=["serial", "forward", "recomputed"],
)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_training_goes_on_after_an_exception(case: Case, place: Any, step: str) -> None:
    with Pair(case, step=step) as pair:
        for number in range(3):
            pair.both(fails(place, broken, Broken))
            pair.steps(1, start=number)
        pair.check()


@pytest.mark.parametrize(
    "place",
    [in_forward, in_a_forward_hook, in_evaluation, in_loss, in_backward, in_a_hook_of_the_optimizer],
    ids=lambda place: place.__name__,
)
def test_what_backward_had_gathered_is_there_after_an_exception(place: Any) -> None:
    """As in plain PyTorch: the gradients of the blocks that were done, and the next backward adds to them.

    Of the block in whose hook it happened, some parameters have theirs, by an order that autograd does not promise.
    """

    def run(side: Side) -> object:
        fails(place, broken, Broken)(side)
        seen = gradients(side.model)
        side.loss(7).backward()
        side.optimizer.step()
        return seen

    with Pair(CHAIN) as pair:
        pair.steps(1)
        pair.both(run, "gradients after the exception")
        pair.check()


@pytest.mark.parametrize("place", [in_forward, in_a_forward_hook, in_evaluation, in_loss], ids=lambda p: p.__name__)
def test_training_goes_on_after_an_exception_before_backward(place: Any) -> None:
    with Pair(CHAIN, step="backward") as pair:
        for number in range(3):
            pair.both(fails(place, broken, Broken))
            pair.steps(1, start=number)
        pair.check(grads=False)


@pytest.mark.parametrize("step", ["forward", "backward"])
def test_an_exception_in_backward_leaves_a_session_that_updates_in_backward_usable(step: str) -> None:
    """In backward mode some units are updated and some are not; the user is told, or goes on with finite numbers."""
    with Pair(CHAIN, step=step) as pair:
        pair.steps(1)
        side = pair.streamed
        side.optimizer.zero_grad()
        with pytest.raises(Broken):
            in_backward(side, broken)
        with pytest.raises(storm.StormError, match="half-done") if step == "backward" else nullcontext():
            side.optimizer.zero_grad()
        side.optimizer.zero_grad()
        for number in range(2):
            assert torch.isfinite(side.step(number))
        assert all(torch.isfinite(parameter).all() for parameter in side.model.parameters())


@pytest.mark.parametrize(
    "place",
    [in_forward, in_loss, in_evaluation, in_a_hook_of_a_parameter, in_a_hook_of_backward],
    ids=lambda place: place.__name__,
)
def test_training_goes_on_after_ctrl_c(place: Any) -> None:
    with Pair(CHAIN) as pair:
        for number in range(2):
            pair.both(fails(place, interrupted, KeyboardInterrupt))
            pair.steps(1, start=number)
        pair.check()


def test_a_model_of_which_nothing_is_streamed_is_refused_in_words() -> None:
    class Special(nn.Parameter):
        pass

    left, special = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4, bias=False)
    special.weight = Special(special.weight.detach())
    for model, leave, count in ((left, ["0"], 2), (special, [], 1)):
        with pytest.raises(storm.SettingError, match=rf"no parameters to stream: all {count} are left.*kind\."):
            storm.stream(model, device="cpu", leave=leave)
    with pytest.raises(storm.SettingError, match=r"no parameters to stream\.$"):
        storm.stream(nn.ReLU(), device="cpu")


def test_an_exception_passes_through_the_session(device: torch.device) -> None:
    model = CHAIN.build()
    with pytest.raises(Broken), stream(model, adamw(model), device=device) as session:  # noqa: PT012
        CHAIN.loss(model, tuple(tensor.to(device) for tensor in CHAIN.batch(0))).backward()
        raise Broken
    assert_ordinary(model)
    assert_returned(session)


def test_a_wrong_edit_between_forward_and_backward_is_noticed() -> None:
    """Autograd's own check of versions, which saved-tensor hooks would silently pass by."""

    def run(side: Side) -> None:
        side.optimizer.zero_grad()
        loss = side.loss(0)
        with torch.no_grad():
            side.named("blocks.4.down.weight").mul_(2)
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()

    with Pair(CHAIN) as pair:
        pair.steps(1)
        pair.both(run)


# ---------------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize("vram", [0, 1000, "4KiB"])
def test_an_impossible_budget_names_tier_tag_limit_and_setting(device: torch.device, vram: object) -> None:
    model = CHAIN.build()
    optimizer = adamw(model)
    with pytest.raises(storm.OutOfBudget) as caught:
        storm.stream(model, optimizer, vram=vram, device=str(device))
    text = str(caught.value)
    assert "device" in text
    assert any(tag.name in text for tag in Tag), text
    assert f"vram={vram!r}" in text
    assert re.search(r"\d+(\.\d)? (B|KiB|MiB)", caught.value.numbers), text
    assert caught.value.remedy
    assert_ordinary(model)
    assert vars(optimizer).keys() == vars(adamw(CHAIN.build())).keys()


def test_an_impossible_ram_is_refused_too() -> None:
    model = CHAIN.build()
    with pytest.raises(storm.OutOfBudget, match="ram="):
        storm.stream(model, adamw(model), ram="4KiB", device="cpu")
    assert_ordinary(model)


@pytest.mark.parametrize(
    ("settings", "accepted"),
    [
        ({"step": "later"}, ["auto", "backward", "forward", "serial"]),
        ({"vram": "12 parsecs"}, ["vram", "GiB"]),
        ({"ram": "much"}, ["ram", "GiB"]),
        ({"vram": -1}, ["vram", "GiB"]),
        ({"activations": "maybe"}, ["auto", "keep"]),
        ({"master_dtype": torch.int8}, ["float32", "None"]),
        ({"device": "tpu:7"}, ["device", "cpu"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], accepted: list[str]) -> None:
    model = CHAIN.build()
    with pytest.raises(storm.SettingError) as caught:
        storm.stream(model, adamw(model), **{"device": "cpu", **settings})
    assert all(word in str(caught.value) for word in accepted), str(caught.value)
    assert_ordinary(model)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model = CHAIN.build()
    with pytest.raises(storm.SettingError, match="optimizer"):
        stream(model, adamw(CHAIN.build()))
    assert_ordinary(model)


# --------------------------------------------------------------------------------------------- updates in backward


@contextmanager
def updating_in_backward() -> Iterator[tuple[Side, Any]]:
    with Pair(CHAIN, step="backward") as pair:
        pair.steps(1)
        pair.streamed.optimizer.zero_grad()
        pair.streamed.loss(1).backward()
        yield pair.streamed, pair.session
        with suppress(storm.StormError):  # no step() has followed
            pair.streamed.optimizer.zero_grad()
        pair.streamed.optimizer.zero_grad()
        for number in range(2):  # the session is usable still
            assert torch.isfinite(pair.streamed.step(number))


OTHER_MODE = r"step=.{0,3}forward"


def test_clipping_is_refused_where_gradients_are_consumed() -> None:
    with updating_in_backward() as (side, session):
        with pytest.raises(storm.StormError, match=OTHER_MODE):
            session.clip_grad_norm_(1.0)
        with pytest.raises(storm.StormError, match=OTHER_MODE):
            nn.utils.clip_grad_norm_(side.model.parameters(), 1.0)


def test_accumulating_is_refused_where_gradients_are_consumed() -> None:
    with updating_in_backward() as (side, _), pytest.raises(storm.StormError, match=OTHER_MODE):
        side.loss(2).backward()


def test_reading_is_refused_where_gradients_are_consumed() -> None:
    with updating_in_backward() as (side, _):
        with pytest.raises(storm.StormError, match=OTHER_MODE):
            _ = torch.as_tensor(side.named("head.weight").grad).sum()  # at the latest when it is used
        with pytest.raises(storm.StormError, match=OTHER_MODE):
            gradients(side.model)


def test_after_zero_grad_there_is_nothing_consumed() -> None:
    with updating_in_backward() as (side, _):
        side.optimizer.step()
        side.optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in side.model.parameters())


# ---------------------------------------------------------------------------------------------------------- closing

HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]


def assert_ordinary(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for hooks in HOOKS:
            assert not getattr(module, hooks), f"{name}.{hooks}"
        assert "forward" not in vars(module), name
        assert "__call__" not in vars(module), name
        assert not any("storm" in key for key in vars(module)), name
        assert not type(module).__module__.startswith("stormtorch"), name
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter, name
        assert parameter.is_leaf, name
        assert not parameter._backward_hooks, name
        assert not getattr(parameter, "_post_accumulate_grad_hooks", None), name


def assert_returned(session: Any) -> None:
    session.ledger.check()
    assert {tier: session.ledger.used_bytes(tier) for tier in Tier} == dict.fromkeys(Tier, 0)


@pytest.mark.parametrize("step", ["serial", "forward", "backward"])
@pytest.mark.parametrize("vram", ["tight", "auto"])
@pytest.mark.parametrize("left_at", ["start", "forward", "backward", "step"])
def test_close_leaves_an_ordinary_model_and_returns_every_byte(
    device: torch.device, step: str, vram: str, left_at: str
) -> None:
    model = CHAIN.build()
    optimizer = adamw(model)
    parameters, attributes, kind = list(model.parameters()), set(vars(optimizer)), type(optimizer)
    session = stream(model, optimizer, device=device, step=step, vram=vram)
    if left_at != "start":
        loss = CHAIN.loss(model, tuple(tensor.to(device) for tensor in CHAIN.batch(0)))
        if left_at != "forward":
            loss.backward()
        if left_at == "step":
            optimizer.step()
    session.close()
    assert_ordinary(model)
    assert_returned(session)
    assert all(mine is given for mine, given in zip(model.parameters(), parameters, strict=True))
    assert all(parameter.device.type == "cpu" for parameter in parameters)
    assert type(optimizer) is kind
    assert set(vars(optimizer)) - {"_opt_called"} == attributes  # schedulers look for this mark of a step
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_the_hooks_of_the_user_stay() -> None:
    heard: list[int] = []
    model = CHAIN.build()
    model.get_submodule("blocks.1").register_forward_hook(lambda *_: heard.append(1))
    model.get_parameter("head.weight").register_hook(lambda _: heard.append(2))
    with stream(model, adamw(model)):
        CHAIN.loss(model, CHAIN.batch(0)).backward()
    CHAIN.loss(model, CHAIN.batch(0)).backward()
    assert heard == [1, 2, 1, 2]


def test_a_session_that_is_dropped_gives_its_bytes_back() -> None:
    model = CHAIN.build()
    session = stream(model, adamw(model))
    ledger = session.ledger
    CHAIN.loss(model, CHAIN.batch(0)).backward()
    threads = threading.active_count()
    session.close()
    del session, model
    gc.collect()
    assert threading.active_count() <= threads
    assert ledger.used_bytes(Tier.DEVICE) == ledger.used_bytes(Tier.HOST) == 0


def test_many_sessions_leave_nothing(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x, budget = torch.randn(2, 8, device=device), max(tight(model), 1 << 16)

    def once(number: int) -> None:
        session = storm.stream(
            model, optimizer, vram=budget, device=str(device), step=("serial", "forward", "backward")[number % 3]
        )
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.close()
        assert_returned(session)

    def standing() -> tuple[int, int, int]:
        gc.collect()
        return threading.active_count(), psutil.Process().num_threads(), len(list(Path("/proc/self/fd").iterdir()))

    for number in range(6):  # pools that torch and the driver make once
        once(number)
    before, rss = standing(), resident_bytes()
    for number in range(daily(70, 200)):
        once(number)
    assert standing() == before
    grown = resident_bytes() - rss
    assert grown < 32 * MiB, f"{grown / MiB:.0f} MiB more after all these sessions"
