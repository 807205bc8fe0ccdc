"""Law: updates that backward begins ahead of the step, into spare memory, give the numbers of plain PyTorch, whatever
happens before the step."""

from __future__ import annotations

import contextlib
import gc
import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch.core.errors import StormError
from stormtorch.native import flag_words
from stormtorch.native.update import AdamStep, AdamTensors
from stormtorch.native.worker.jobs import FlagValue, Worker
from stormtorch.streams.optimizer.adam import ahead
from stormtorch.streams.optimizer.adam.ahead import Ahead

from ..thinning import daily
from .models import CHAIN, LLAMA, OTHERS, Case, Pair, Side, cross_entropy, frozen, one_thread, same, tight  # noqa: F401  # a fixture
from .models import tokens as tokens_of

DROPPING = next(case for case in OTHERS if case.name == "dropout")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units keep updates ahead however slow the machine is, and try again soon after a step that has clipped."""
    monkeypatch.setattr(ahead, "_LATE", 10**6)
    monkeypatch.setattr(ahead, "_REST", 2)


def ahead_of(pair: Pair) -> Ahead:
    adam = pair.session._parts.adam
    assert adam is not None
    return adam.ahead


def shapes(step: int) -> Any:
    """Batches of changing lengths."""
    given, target = tokens_of(step)
    length = given.shape[1] - step % 3
    return given[:, :length], target[:, :length]


def clipped_step(step: int, limit: float) -> Callable[[Side], tuple[torch.Tensor, torch.Tensor]]:
    def loss_and_norm(side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(step)
        loss = side.loss(step)
        loss.backward()
        total = nn.utils.clip_grad_norm_(side.model.parameters(), limit)
        side.optimizer.step()
        side.optimizer.zero_grad()
        return loss.detach(), total if side.device.type == "cpu" else torch.ones(())  # a GPU adds up in another order

    return loss_and_norm


@pytest.mark.parametrize("case", [DROPPING, pytest.param(LLAMA, marks=pytest.mark.wide)], ids=lambda case: case.name)
def test_clipping_that_comes_and_goes(case: Case, device: torch.device) -> None:
    """In many steps, some clip and some do not; batches change their shape."""
    case = Case(case.name, case.make, shapes, cross_entropy)
    with Pair(case, device=device, ahead=True) as pair:
        norms, clipped, limit = list[float](), 0, 1e9
        steps = daily(50, 200)
        for number in range(steps):
            if number % 10 == 9 and device.type == "cpu":
                limit = statistics.median(norms[-10:]) * 1.05
            norms.append(float(pair.both(clipped_step(number, limit))[1]))
            clipped += norms[-1] > limit
        pair.check()
        seen = ahead_of(pair)
        assert seen.taken_over > steps / 2
        if device.type == "cpu":
            assert steps / 10 < clipped < steps * 0.9
            assert seen.begun > seen.taken_over


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters(dtype: torch.dtype, device: torch.device) -> None:
    case = Case("chain", lambda: CHAIN.make().to(dtype), CHAIN.batch, CHAIN.loss)
    with Pair(case, device=device, ahead=True) as first, Pair(case, device=device) as second:
        left = []
        for pair in (first, second):
            for number in range(6):
                pair.streamed.step(number)
            left.append(frozen((pair.streamed.model.state_dict(), pair.streamed.optimizer.state_dict())))
        same(left[0], left[1], "the same without updates ahead")
        assert ahead_of(first).taken_over


def _read_weights(side: Side) -> Any:
    return [p.detach().cpu().norm() for p in side.model.parameters()]


def _write_a_weight(side: Side) -> None:
    with torch.no_grad():
        next(side.model.parameters()).mul_(0.5)


def _write_through_data(side: Side) -> None:
    list(side.model.parameters())[-1].data.add_(0.125)


def _scale_a_gradient(side: Side) -> None:
    list(side.model.parameters())[2].grad.mul_(0.5)  # type: ignore[union-attr]


def _scale_all_gradients(side: Side) -> None:
    for parameter in side.model.parameters():
        parameter.grad.mul_(2.0)  # type: ignore[union-attr]


def _new_gradient(side: Side) -> None:
    parameter = list(side.model.parameters())[2]
    parameter.grad = torch.ones_like(parameter)


def _no_gradient(side: Side) -> None:
    list(side.model.parameters())[2].grad = None


def _lower_the_rate(side: Side) -> None:
    for group in side.optimizer.param_groups:
        group["lr"] *= 0.5


def _read_states(side: Side) -> Any:
    return [state["exp_avg_sq"].sum() for state in side.optimizer.state.values()]


def _write_states(side: Side) -> None:
    for state in side.optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def _forget_a_state(side: Side) -> None:
    side.optimizer.state.pop(next(iter(side.optimizer.state)), None)


def _count_again(side: Side) -> None:
    for state in side.optimizer.state.values():
        state["step"].fill_(1)


def _reload(side: Side) -> None:
    side.optimizer.load_state_dict(side.optimizer.state_dict())
    side.model.load_state_dict(side.model.state_dict())


def _skip(side: Side) -> None:
    side.optimizer.zero_grad()


def _fill_with_zeros(side: Side) -> None:
    side.optimizer.zero_grad(set_to_none=False)


def _backward_again(side: Side) -> torch.Tensor:
    loss = side.loss(1000)
    loss.backward()
    return loss.detach()


def _evaluate(side: Side) -> torch.Tensor:
    with torch.no_grad():
        return side.loss(2000)


def _fail_in_backward(side: Side) -> None:
    blocks = next(child for child in side.model.children() if isinstance(child, nn.ModuleList))

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = blocks[len(blocks) // 2].register_full_backward_hook(fail)
    try:
        with pytest.raises(ZeroDivisionError):
            side.loss(3000).backward()
    finally:
        handle.remove()
    side.optimizer.zero_grad()


BETWEEN: list[Callable[[Side], Any]] = [
    _read_weights,
    _write_a_weight,
    _write_through_data,
    _scale_a_gradient,
    _scale_all_gradients,
    _new_gradient,
    _no_gradient,
    _lower_the_rate,
    _read_states,
    _write_states,
    _forget_a_state,
    _count_again,
    _reload,
    _skip,
    _fill_with_zeros,
    _backward_again,
    _evaluate,
    _fail_in_backward,
]


@pytest.mark.parametrize("between", BETWEEN, ids=lambda action: action.__name__[1:])
@pytest.mark.daily(
    "read_weights",
    "write_a_weight",
    "scale_all_gradients",
    "new_gradient",
    "lower_the_rate",
    "write_states",
    "reload",
    "skip",
    "backward_again",
    "fail_in_backward",
)
def test_what_user_code_does_before_the_step(between: Callable[[Side], Any], device: torch.device) -> None:
    with Pair(CHAIN, device=device, ahead=True) as pair:
        for number in range(daily(11, 14)):
            pair.both(lambda side, n=number: _backward(side, n), "loss")  # type: ignore[misc]
            if number in (4, 5, 9):
                assert ahead_of(pair).begun or number < 5
                pair.both(between)
            pair.both(lambda side: (side.optimizer.step(), side.optimizer.zero_grad())[1])
        pair.check()
        assert ahead_of(pair).taken_over > daily(7, 10)


def _backward(side: Side, number: int) -> torch.Tensor:
    loss = side.loss(number)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("parts", [(2, 2, 2, 2, 2), (1, 2, 1, 3, 3, 3, 1, 1, 1)], ids=str)
def test_accumulation(parts: tuple[int, ...], device: torch.device) -> None:
    with Pair(LLAMA, device=device, ahead=True) as pair:
        for number, count in enumerate(parts):
            for part in range(count):
                pair.both(lambda side, n=10 * number + part: _backward(side, n), "loss")  # type: ignore[misc]
            pair.both(lambda side: (side.optimizer.step(), side.optimizer.zero_grad())[1])
        pair.check()
        assert ahead_of(pair).taken_over


def test_several_groups_and_a_scheduler(device: torch.device) -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        some, others = list(model.parameters())[::2], list(model.parameters())[1::2]
        groups = [{"params": some, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, fused=True)

    with Pair(CHAIN, optimizer, device=device, ahead=True) as pair:
        schedulers = {
            id(side): torch.optim.lr_scheduler.LambdaLR(side.optimizer, lambda n: 1 / (n + 1))
            for side in (pair.plain, pair.streamed)
        }
        for number in range(8):
            pair.steps(1, number)
            pair.both(lambda side: schedulers[id(side)].step())
        pair.check()
        assert ahead_of(pair).taken_over


def test_checkpoints(device: torch.device, tmp_path: Path) -> None:
    """Saved while updates are ahead, in the background too; resumed with and without them."""
    plain: dict[str, Any] = {}

    def note(name: str) -> None:
        plain[name] = frozen((pair.plain.model.state_dict(), pair.plain.optimizer.state_dict()))

    with Pair(CHAIN, device=device, ahead=True) as pair:
        pair.steps(4)
        note("one")
        pair.session.save(tmp_path / "one", wait=False)
        pair.steps(3, 4)
        pair.both(lambda side: _backward(side, 7), "loss")
        pair.both(_skip)
        note("two")
        pair.session.save(tmp_path / "two")
    for name, is_ahead, steps in (("one", False, 4), ("two", True, 7)):
        with Pair(CHAIN, device=device, ahead=is_ahead) as other:
            other.session.load(tmp_path / name)
            other.plain.model.load_state_dict(plain[name][0])
            other.plain.optimizer.load_state_dict(plain[name][1])
            other.steps(4, steps)
            other.check()


def test_a_session_that_ends(device: torch.device) -> None:
    with Pair(CHAIN, device=device, ahead=True) as pair:
        pair.steps(5)
        assert ahead_of(pair).taken_over
    pair.check(grads=False)
    if device.type == "cpu":  # where the model is now
        for number in range(5, 8):
            assert torch.equal(pair.plain.step(number), pair.streamed.step(number))


def test_memory_that_is_given_back() -> None:
    with Pair(CHAIN, ahead=True) as pair:
        adam = pair.session._parts.adam
        assert adam is not None
        pair.steps(4)
        taken, before = adam.spare_bytes, pair.session.plan.optimizer
        assert taken > 0
        assert "updated in backward" in str(before)
        ledger = pair.session.ledger
        used = sum(balance.used_bytes for balance in ledger.balances())
        adam.stop_ahead()
        assert used - sum(balance.used_bytes for balance in ledger.balances()) >= taken
        assert adam.spare_bytes == adam.ahead_units == 0
        pair.steps(4, 4)
        pair.check()


class Late:
    """Keeps updates ahead of one unit from beginning until ``begin``, as a busy CPU would."""

    def __init__(self, pair: Pair, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        adam = pair.session._parts.adam
        assert adam is not None
        unit = next(home.unit for home in adam.homes if home.unit.name == name)
        image = adam.ahead.image(unit)
        memory = range(image.data_ptr(), image.data_ptr() + image.nbytes)
        self.is_on, self.held, self._word = True, 0, torch.zeros(1, dtype=torch.int32)
        submit = Worker.submit

        def late(worker: Worker, tensors: AdamTensors, step: AdamStep, **settings: Any) -> int:
            if self.is_on and tensors.source is not None and tensors.weight.data_ptr() in memory:
                self.held += 1
                settings["ready"] = FlagValue(self._word.data_ptr(), 1, owner=self._word)
            return submit(worker, tensors, step, **settings)

        monkeypatch.setattr(Worker, "submit", late)

    def begin(self) -> None:
        flag_words.store(self._word.data_ptr(), 1)


class Branches(nn.Module):
    """Every other batch goes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.odd = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.odd if self.calls % 2 else self.even:
            x = torch.tanh(layer(x))
        return x


def vector(step: int) -> Any:
    return (torch.randn(4, 64, generator=torch.Generator().manual_seed(step)),)


def test_a_clip_does_not_stop_what_an_earlier_step_has_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("branches", Branches, vector, lambda model, batch: model(*batch).square().sum())
    with Pair(case, ahead=True) as pair:
        for number in range(6):
            pair.both(clipped_step(number, 1e9))
        late, taken = Late(pair, monkeypatch, "odd.5"), ahead_of(pair).taken_over
        pair.both(clipped_step(6, 1e9))
        assert late.held
        assert ahead_of(pair).taken_over > taken
        late.is_on = False
        threading.Timer(0.5, late.begin).start()
        pair.both(clipped_step(7, 1e-3))
        pair.both(clipped_step(8, 1e9))
        pair.check()


@pytest.mark.parametrize("late", [False, True])
def test_a_session_that_fails_leaves_weights_and_states_of_one_step(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(CHAIN, ahead=True, seed=None)
    pair.steps(4)
    model, optimizer = pair.streamed.model, pair.streamed.optimizer
    held = Late(pair, monkeypatch, "blocks.3") if late else None
    store, go = pair.session._parts.ground.lanes.store, threading.Event()
    units, copy, copied = len(ahead_of(pair).units), store.copy, list[int]()

    def fail() -> None:
        go.wait(20)
        raise RuntimeError("bus error")

    def copy_then_fail(*args: Any) -> None:
        copied.append(1)
        if len(copied) == units:
            store.enqueue(fail)  # type: ignore[attr-defined]
        copy(*args)

    monkeypatch.setattr(store, "copy", copy_then_fail)
    _backward(pair.streamed, 5)
    optimizer.step()
    go.set()
    with pytest.raises(StormError):
        pair.session.synchronize()
    if held is not None:
        held.begin()
    with contextlib.suppress(StormError):
        pair.session.close()
    _backward(pair.plain, 5)
    before = frozen([_weight_and_state(pair.plain, name) for name, _ in model.named_parameters()])
    pair.plain.optimizer.step()
    after = frozen([_weight_and_state(pair.plain, name) for name, _ in model.named_parameters()])
    for (name, _), old, new in zip(model.named_parameters(), before, after, strict=True):
        mine = _weight_and_state(pair.streamed, name)
        assert any(all(torch.equal(*pair) for pair in zip(mine, one, strict=True)) for one in (old, new)), name


def _weight_and_state(side: Side, name: str) -> list[torch.Tensor]:
    parameter = side.named(name)
    return [parameter.detach(), side.optimizer.state[parameter]["exp_avg"]]


def test_memory_that_is_given_back_goes() -> None:
    with Pair(CHAIN, ahead=True) as pair:
        adam = pair.session._parts.adam
        assert adam is not None
        pair.steps(5)
        starts = [arena._regions[0].address for arena in adam.ahead._arenas]
        adam.stop_ahead()
        pair.steps(2, 5)
        gc.collect()
        mapped = [line.split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        spans = [(int(first, 16), int(rest.split()[0], 16)) for first, rest, *_ in mapped]
        assert starts
        assert not any(first <= start < last for start in starts for first, last in spans)
        pair.check()


def test_an_array_that_user_code_writes_to() -> None:
    """Through memory that was given out before, as torch allows."""
    with Pair(CHAIN, ahead=True) as pair:
        pair.steps(4)
        parameters = {id(side): next(side.model.parameters()) for side in (pair.plain, pair.streamed)}
        arrays = {id(side): parameters[id(side)].detach().numpy() for side in (pair.plain, pair.streamed)}
        states = {
            id(side): side.optimizer.state[list(side.model.parameters())[-1]]["exp_avg"].numpy()
            for side in (pair.plain, pair.streamed)
        }
        for number in range(4, 8):
            pair.both(lambda side, n=number: _backward(side, n), "loss")  # type: ignore[misc]
            pair.session.synchronize()
            for side in (pair.plain, pair.streamed):
                arrays[id(side)][...] *= 0.5
                states[id(side)][...] *= 0.5
            pair.both(lambda side: (side.optimizer.step(), side.optimizer.zero_grad())[1])
        pair.check()


def test_an_array_of_a_gradient_that_user_code_writes_to() -> None:
    with Pair(LLAMA, ahead=True) as pair:
        for number in range(6):
            arrays = {}
            for part in range(2):
                pair.both(lambda side, n=10 * number + part: _backward(side, n), "loss")  # type: ignore[misc]
                if number >= 3 and not part:
                    for side in (pair.plain, pair.streamed):
                        grad = list(side.model.parameters())[5].grad
                        assert grad is not None
                        arrays[id(side)] = grad.numpy()
            if arrays:
                pair.session.synchronize()  # a write through an array does not wait
            for array in arrays.values():
                array[...] *= 0.5
            pair.both(lambda side: (side.optimizer.step(), side.optimizer.zero_grad())[1])
        pair.check()
        assert ahead_of(pair).taken_over


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_state_that_is_replaced_before_the_session_ends(is_ahead: bool) -> None:
    def replace(side: Side) -> None:
        parameter = list(side.model.parameters())[5]
        side.optimizer.state[parameter]["exp_avg_sq"] = torch.full(parameter.shape, 0.01)

    with Pair(CHAIN, ahead=is_ahead) as pair:
        pair.steps(4)
        pair.both(replace)
    pair.check(grads=False)


def test_settings_that_are_wrong_until_the_step() -> None:
    def set_rate(rate: float) -> Callable[[Side], None]:
        def act(side: Side) -> None:
            for group in side.optimizer.param_groups:
                group["lr"] = rate

        return act

    with Pair(CHAIN, ahead=True) as pair:
        pair.steps(4)
        pair.both(set_rate(-1.0))
        pair.both(lambda side: _backward(side, 4), "loss")
        pair.both(set_rate(1e-2))
        pair.both(lambda side: (side.optimizer.step(), side.optimizer.zero_grad())[1])
        pair.steps(3, 5)
        pair.check()


@pytest.mark.parametrize("is_ahead", [False, True])
def test_clipping_by_torch_and_then_by_the_session(is_ahead: bool) -> None:
    def twice(side: Side) -> torch.Tensor:
        nn.utils.clip_grad_norm_(side.model.parameters(), 0.5)
        if side.session is not None:
            return side.session.clip_grad_norm_(0.1)
        return nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)

    with Pair(CHAIN, ahead=is_ahead) as pair:
        pair.steps(3)
        pair.both(lambda side: _backward(side, 3), "loss")
        pair.both(twice)
        pair.both(lambda side: (side.optimizer.step(), side.optimizer.zero_grad())[1])
        pair.check()


@pytest.mark.parametrize("part", [0.5, 1.0])
def test_the_device_updates_what_backward_does_not(part: float, device: torch.device) -> None:
    vram = 2 * tight(CHAIN.build()) * (4 if device.type == "cuda" else 1)
    with Pair(CHAIN, device=device, vram=vram, seed=1) as pair:
        adam = pair.session._parts.adam
        assert adam is not None
        adam.there.share(part, 4 << 20, early=True)
        pair.steps(2)
        last = adam.homes[-4:]
        adam.spare(sum(home.unit.state_count for home in last), 1 << 40)
        assert adam.ahead.units == [home.unit for home in reversed(last)]
        pair.steps(2, 2)  # units that the device updates remain its own until the work is divided again
        adam.there.share(part, 4 << 20, early=True)
        pair.steps(4, 4)
        assert adam.taken_over
        assert any(home.on_device for home in adam.homes)
        assert not any(home.on_device for home in last)
        adam.stop_ahead()
        adam.there.share(1.0, 4 << 20, early=True)
        assert all(home.on_device for home in adam.homes if home.unit.trained)
        pair.steps(3, 8)
        pair.check()


def test_units_that_move_to_the_device() -> None:
    """Lanes copy states of the first set only, whose memory is known to be page-locked."""
    with Pair(CHAIN, ahead=True, vram=8 << 20) as pair:
        adam = pair.session._parts.adam
        assert adam is not None
        pair.steps(4)
        assert any(adam.state_home.is_exchanged(home.unit) for home in adam.homes)
        adam.there.share(0.5, 4 << 20, early=True)
        assert not any(home.on_device for home in adam.homes)  # all have a spare
        adam.stop_ahead()
        adam.there.share(0.5, 4 << 20, early=True)
        moved = [home for home in adam.homes if home.on_device]
        assert moved
        assert not any(adam.state_home.is_exchanged(home.unit) for home in moved)
        pair.steps(4, 4)
        pair.check()
