"""Law: a signal handler may use a streamed model. It sees what plain PyTorch could show, or is told to set a flag;
nothing hangs, and training goes on with the same numbers.

A thread sends the signals at random moments, or a tracing function does at lines of our own files, which is every
moment there is. pytest's own timer ends what hangs."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import linecache
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import stormtorch as storm
from stormtorch.streams.bridge import handlers

from .models import one_thread  # noqa: F401  # a fixture

IS_WIDE = bool(os.environ.get("STORM_WIDE"))
READS, SAVES = (2000, 200) if IS_WIDE else (300, 20)
READS_EVERY = 5 if IS_WIDE else 97  # lines
OURS = str(Path(storm.__file__).parent)
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
WAYS: dict[str, dict[str, Any]] = {
    "forward": {},
    "backward": {"step": "backward"},
    "serial": {"step": "serial"},
    "recompute": {"activations": "recompute"},
    "offload": {"activations": "offload"},
    "sgd": {"optimizer": "sgd"},
}


class TimeIsUp(Exception):
    """What a user's watchdog raises."""


class Loop:
    """A training loop, as a user writes it."""

    def __init__(self, way: dict[str, Any], device: str = "cpu", *, blocks: int = 12, plain: bool = False) -> None:
        torch.manual_seed(0)
        settings = dict(way)
        self.blocks = blocks
        self.device = device
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(blocks)))
        if plain:
            self.model.to(device)
        if settings.pop("optimizer", None) == "sgd":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.session: Any = None
        if not plain:
            vram = "100KiB" if device == "cpu" else "400KiB"
            self.session = storm.stream(self.model, self.optimizer, device=device, vram=vram, **settings)
        self.losses: list[torch.Tensor] = []
        self.number = 0  # of the step that runs

    def step(self, number: int | None = None) -> None:
        self.number = len(self.losses) if number is None else number
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(self.number)).to(self.device)
        self.optimizer.zero_grad()
        loss = self.model(inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def weight(self) -> torch.Tensor:
        weight: Any = self.model[0][0].weight  # type: ignore[index]
        return weight  # type: ignore[no-any-return]

    def sum(self) -> float:
        return float(self.weight().detach().sum())

    def values(self) -> bytes:
        return self.weight().detach().cpu().clone().numpy().tobytes()

    def digest(self) -> str:
        return digest_of({name: value.cpu() for name, value in self.model.state_dict().items()})

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].detach().clone().numpy().tobytes())
    return total.hexdigest()


@contextlib.contextmanager
def signals(handler: Callable[[], None], *, until: int, pause_s: float = 0.004) -> Iterator[Callable[[], bool]]:
    """Sends signals at random moments, one after the other, until so many have been handled; yields whether it does."""
    main, count, handled = threading.main_thread().ident, [0], threading.Semaphore(0)
    stop, chance = threading.Event(), random.Random(0)

    def handle(_number: int, _frame: FrameType | None) -> None:
        try:
            handler()
        finally:
            count[0] += 1
            handled.release()

    def send() -> None:
        assert main is not None
        while not stop.is_set() and count[0] < until:
            time.sleep(chance.choice((0.0, chance.uniform(0.0, pause_s))))
            signal.pthread_kill(main, signal.SIGUSR1)
            handled.acquire(timeout=5.0)

    before = signal.signal(signal.SIGUSR1, handle)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield lambda: count[0] < until
    finally:
        stop.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def same_as_undisturbed(loop: Loop, way: dict[str, Any]) -> Loop:
    """An undisturbed run of as many steps, which had the same losses."""
    other = Loop(way, loop.device, blocks=loop.blocks)
    for _ in loop.losses:
        other.step()
    assert [loss.item() for loss in loop.losses] == [loss.item() for loss in other.losses]
    assert loop.digest() == other.digest()
    return other


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.daily("forward", "backward", "recompute", "offload")
@pytest.mark.daily("forward", "offload")
def test_a_handler_that_reads_weights(way: str, device: str) -> None:
    loop = Loop(WAYS[way], device)
    seen: list[tuple[int, bytes]] = []

    def handler() -> None:
        assert isinstance(loop.sum(), float)
        seen.append((loop.number, loop.values()))

    with signals(handler, until=READS) as go_on:
        while go_on():
            loop.step()
    loop.close()
    serial = Loop({**WAYS[way], "step": "serial"}, device)
    losses, values = [], [serial.values()]
    for _ in loop.losses:
        serial.step()
        losses.append(serial.losses[-1].item())
        values.append(serial.values())
    serial.close()
    assert [loss.item() for loss in loop.losses] == losses
    for number, value in seen:  # as they were before that step, or after
        assert value in values[number : number + 2], f"in step {number}"


def handle_state_dict(loop: Loop) -> None:
    assert len(digest_of({name: value.cpu() for name, value in loop.model.state_dict().items()})) == 64


def handle_optimizer_state(loop: Loop) -> None:
    for state in loop.optimizer.state_dict()["state"].values():
        assert all(bool(torch.isfinite(value).all()) for value in state.values() if isinstance(value, torch.Tensor))


def handle_grad(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        if parameter.grad is not None:
            assert bool(torch.isfinite(parameter.grad).all())


def handle_report(loop: Loop) -> None:
    assert str(loop.session.report())


def handle_text(loop: Loop) -> None:
    assert "Linear" in str(loop.model)
    assert "Parameter" in str(loop.weight()) or "tensor" in str(loop.weight())


def handle_synchronize(loop: Loop) -> None:
    loop.session.synchronize()


def handle_norm(loop: Loop) -> None:
    """With a graph of its own, and what autograd saves for that."""
    assert (loop.weight().norm() * 2).isfinite()


def handle_evaluation(loop: Loop) -> None:
    """Calling the model is refused inside of a step, and works outside."""
    with torch.no_grad(), contextlib.suppress(storm.InsideStep):
        assert bool(loop.model(torch.zeros(1, 64, device=loop.device)).isfinite().all())


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("way", ["forward", "recompute", "sgd"])
@pytest.mark.parametrize(
    "handle",
    [
        handle_state_dict,
        handle_optimizer_state,
        handle_grad,
        handle_report,
        handle_text,
        handle_synchronize,
        handle_norm,
        handle_evaluation,
    ],
    ids=lambda handle: handle.__name__,
)
def test_a_handler_that_looks_at(handle: Callable[[Loop], None], way: str, device: str) -> None:
    loop = Loop(WAYS[way], device)
    with signals(lambda: handle(loop), until=READS // 5) as go_on:
        while go_on():
            loop.step()
    same_as_undisturbed(loop, WAYS[way]).close()
    loop.close()


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("wait", [True, False], ids=["waits", "behind"])
def test_a_handler_that_saves(tmp_path: Path, wait: bool, device: str) -> None:
    """In the middle of a forward too; where it cannot, it sets a flag and the loop saves."""
    loop = Loop({}, device)
    found: list[str] = []
    names = iter(range(1 << 30))
    flag, direct, asked = False, 0, 0

    def save() -> None:
        loop.session.save(tmp_path / str(next(names)), wait=wait)

    def handler() -> None:
        nonlocal flag, direct, asked
        asked += 1
        try:
            save()
            direct += 1
        except storm.InsideStep:
            flag = True

    # More than SAVES only if all of them have come inside a backward or a step, as they may on a busy machine.
    with signals(handler, until=20 * SAVES, pause_s=0.1) as go_on:
        while go_on() and (asked < SAVES or not direct):
            loop.step()
            if flag:
                flag = False
                save()
            if len(loop.losses) % 8 == 0:
                loop.session.synchronize()
                found += checkpoints_in(tmp_path)
    loop.session.synchronize()
    found += checkpoints_in(tmp_path)
    other = Loop({}, device)
    allowed = {other.digest()}
    for _ in loop.losses:
        other.step()
        allowed.add(other.digest())
    assert [loss.item() for loss in loop.losses] == [loss.item() for loss in other.losses]
    assert direct
    assert len(found) >= direct
    assert set(found) <= allowed
    loop.close()
    other.close()


def checkpoints_in(folder: Path) -> list[str]:
    """What the weights of the checkpoints there are; these are removed."""
    found = []
    for path in folder.iterdir():
        if (path / "model.safetensors").exists() and path.name.isdigit():
            found.append(digest_of(load_file(path / "model.safetensors")))
            shutil.rmtree(path)
    return found


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("way", ["forward", "recompute", "offload", "sgd"])
@pytest.mark.daily("recompute", "sgd")
def test_a_handler_that_raises(way: str, device: str) -> None:
    """It cuts off whatever runs, but no update: the step that it came in is done, or is not."""
    gc.collect()  # what other tests have left: Python drops an exception that a handler raises inside a finalizer
    loop, undisturbed = Loop(WAYS[way], device), Loop(WAYS[way], device)
    taken: list[int] = []
    raised = number = 0
    armed = False

    def handler() -> None:
        nonlocal armed
        if armed:
            armed = False
            raise TimeIsUp

    def steps_done() -> int:
        return int(loop.session._parts.optimizer.steps)

    with signals(handler, until=READS // 2) as go_on:
        while go_on():
            before = steps_done()
            armed = True
            try:
                loop.step(number)
            except TimeIsUp:
                raised += 1
            armed = False
            torch.set_grad_enabled(True)  # torch's own no_grad is left on where a handler raises inside of its lines
            if steps_done() > before:
                taken.append(number)
            number += 1
    assert raised
    loop.step(number)
    for done in [*taken, number]:
        undisturbed.step(done)
    assert loop.digest() == undisturbed.digest()
    undisturbed.close()
    loop.close()


def test_a_handler_that_is_installed_later_and_replaced() -> None:
    """`signal.signal` after `storm.stream`: the session finds it; when it is closed, it is the user's own again."""
    came: list[str] = []

    def first(*_: object) -> None:
        came.append("first")

    def second(*_: object) -> None:
        came.append("second")

    loop = Loop({})
    before = signal.signal(signal.SIGUSR2, first)
    try:
        loop.step()
        assert type(signal.getsignal(signal.SIGUSR2)) is handlers.Deferred
        signal.raise_signal(signal.SIGUSR2)
        replaced = signal.signal(signal.SIGUSR2, second)
        loop.step()
        signal.raise_signal(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, replaced)
        signal.raise_signal(signal.SIGUSR2)
        assert came == ["first", "second", "first"]
    finally:
        loop.close()
        assert signal.getsignal(signal.SIGUSR2) is first
        signal.signal(signal.SIGUSR2, before)


@handlers.undisturbed
def in_a_section(action: Callable[[], None]) -> None:
    action()


def test_a_signal_waits_for_the_end_of_a_section() -> None:
    came: list[str] = []
    loop = Loop({})
    before = signal.signal(signal.SIGUSR2, lambda *_: came.append("handled"))

    def send() -> None:
        for _ in range(3):
            signal.raise_signal(signal.SIGUSR2)
        came.append("inside")

    try:
        in_a_section(lambda: in_a_section(send))
    finally:
        loop.close()
        signal.signal(signal.SIGUSR2, before)
    assert came == ["inside", "handled"]


def test_a_second_ctrl_c_and_a_signal_that_waits_too_long_get_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """They find the session busy, and are told so."""
    monkeypatch.setattr(handlers, "PATIENCE_S", 0.2)
    loop, told = Loop({}), list[str]()

    def handler(*_: object) -> None:
        with pytest.raises(storm.InsideStep, match="Set a flag"):
            loop.sum()
        told.append("told")

    def press() -> None:
        signal.raise_signal(signal.SIGINT)
        assert not told
        signal.raise_signal(signal.SIGINT)
        assert told == ["told"]

    def wait() -> None:
        signal.raise_signal(signal.SIGUSR2)
        while len(told) < 2:
            time.sleep(0.01)

    befores = [(number, signal.signal(number, handler)) for number in (signal.SIGINT, signal.SIGUSR2)]
    try:
        in_a_section(press)
        in_a_section(wait)
        loop.step()
        assert isinstance(loop.sum(), float)
        assert told == ["told", "told"]
    finally:
        loop.close()
        for number, before in befores:
            signal.signal(number, before)


def test_a_handler_on_the_main_thread_while_another_trains() -> None:
    loop = Loop({})
    done = threading.Event()

    def train() -> None:
        try:
            for _ in range(30):
                loop.step()
        finally:
            done.set()

    thread = threading.Thread(target=train)
    seen: list[float] = []
    with signals(lambda: seen.append(loop.sum()), until=1 << 30):
        thread.start()
        while not done.wait(0.01):
            pass
        thread.join()
    assert seen
    same_as_undisturbed(loop, {}).close()
    loop.close()


def test_what_is_refused_inside_of_a_step() -> None:
    """In a handler that comes in the middle of a forward or a backward; outside of them it is as ever."""
    loop = Loop({})
    loop.step()
    refused: list[str] = []
    attempts: dict[str, Callable[[], object]] = {
        "load": lambda: loop.session.load("nowhere"),
        "close": loop.session.close,
        "step": loop.optimizer.step,
        "zero_grad": loop.optimizer.zero_grad,
        "call": lambda: loop.model(torch.zeros(1, 64)),
    }

    def handler(*_: object) -> None:
        for name, attempt in attempts.items():
            with pytest.raises(storm.InsideStep, match="Set a flag"):
                attempt()
            refused.append(name)

    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, handler)
    first: Any = loop.model[0]
    try:
        for register in (first.register_forward_hook, loop.weight().register_hook):
            hook = register(interrupt)
            loop.step()
            hook.remove()
        assert refused == [*attempts, *attempts]
        loop.optimizer.zero_grad()
    finally:
        signal.signal(signal.SIGUSR2, before)
        loop.close()


class EveryLine:
    """Sends a signal at every ``stride``-th line that the main thread runs of our own files, handlers apart."""

    def __init__(self, stride: int) -> None:
        self.stride, self.lines, self.handled = stride, 0, 0
        self.is_handling = False

    def during(self, action: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            action()
        finally:
            sys.settrace(before)

    def _is_to_be_sent(self) -> bool:
        return self.lines % self.stride == 0

    def _trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        if self.is_handling or OURS not in frame.f_code.co_filename or frame.f_code.co_filename.endswith("handlers.py"):
            return None
        # Signals are looked at after calls and at the ends of loops: not at a "try", nor at the end of a "with".
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith(("with ", "try:", "finally:")):
            self.lines += 1
            if self._is_to_be_sent():
                signal.raise_signal(signal.SIGUSR1)
        return self._trace


class OneLine(EveryLine):
    """Sends one, at line number ``at``."""

    def _is_to_be_sent(self) -> bool:
        return self.lines == self.stride


def look_at_everything(loop: Loop) -> None:
    handle_state_dict(loop)
    handle_optimizer_state(loop)
    handle_report(loop)
    handle_norm(loop)
    with contextlib.suppress(storm.StormError):  # step="backward" has none to show
        handle_grad(loop)


@contextlib.contextmanager
def handler_at_lines(handler: Callable[[], None], *, every: int) -> Iterator[EveryLine]:
    trace = EveryLine(every)

    def handle(*_: object) -> None:
        trace.is_handling = True
        try:
            handler()
        finally:
            trace.is_handling = False
            trace.handled += 1

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield trace
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.daily("forward", "backward", "recompute", "offload")
def test_a_handler_at_every_line_of_a_step(way: str) -> None:
    loop = Loop(WAYS[way], blocks=4)
    with handler_at_lines(lambda: look_at_everything(loop), every=READS_EVERY) as trace:
        for number in range(4):
            (loop.step if number < 2 else lambda: trace.during(loop.step))()
    assert trace.handled > 10
    same_as_undisturbed(loop, WAYS[way]).close()
    loop.close()


@pytest.mark.parametrize("way", ["forward", "recompute", "offload", "sgd"])
@pytest.mark.daily("forward", "offload")
def test_a_handler_that_raises_at_every_line_of_a_step(way: str) -> None:
    """The step is done then, or it is not; the next one has the numbers of plain PyTorch."""
    loop, plain = Loop(WAYS[way], blocks=4), Loop({"optimizer": WAYS[way].get("optimizer")}, blocks=4, plain=True)

    def both(number: int) -> None:
        loop.step(number)
        plain.step(number)

    def handler(*_: object) -> None:
        trace.is_handling = True  # once is enough
        raise TimeIsUp

    for number in range(3):
        both(number)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for number in itertools.count(3, 2):
            trace = OneLine(number * 5 * READS_EVERY)
            steps = loop.session._parts.optimizer.steps
            with contextlib.suppress(TimeIsUp):
                trace.during(lambda number=number: loop.step(number))  # type: ignore[misc]
            torch.set_grad_enabled(True)
            if loop.session._parts.optimizer.steps > steps:
                plain.step(number)
            both(number + 1)
            assert loop.digest() == plain.digest(), f"after line {trace.stride}"
            if not trace.is_handling:
                break
    finally:
        signal.signal(signal.SIGUSR1, before)
    loop.close()


def test_a_handler_that_saves_at_lines_of_a_step(tmp_path: Path) -> None:
    loop, number, digests = Loop({}, blocks=4), 0, []

    def save() -> None:
        nonlocal number
        with contextlib.suppress(storm.InsideStep):
            loop.session.save(tmp_path / str(number), wait=number % 2 == 0)
            number += 1

    with handler_at_lines(save, every=20 * READS_EVERY) as trace:
        for _ in range(4):
            digests.append(loop.digest())
            trace.during(loop.step)
    assert number
    loop.session.synchronize()
    assert set(checkpoints_in(tmp_path)) <= {*digests, loop.digest()}
    same_as_undisturbed(loop, {}).close()
    loop.close()


@pytest.mark.parametrize("way", ["forward", "sgd"])
def test_a_handler_at_every_line_of_other_calls(way: str, tmp_path: Path) -> None:
    """What a session offers beside the step, and what user code does with parameters between steps."""

    def use(loop: Loop, folder: Path) -> None:
        session, weight = loop.session, loop.weight()
        session.save(folder / "one")
        session.save(folder / "two", wait=False)
        with torch.no_grad():
            weight.mul_(0.5)
            weight.data = weight.data + 1
        session.synchronize()
        session.load(folder / "two")
        for parameter in loop.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25, device="cpu")
            parameter.grad.mul_(2)
        session.clip_grad_norm_(1.0)
        assert str(session.report())
        loop.optimizer.step()
        loop.optimizer.load_state_dict(loop.optimizer.state_dict())
        loop.model.load_state_dict(loop.model.state_dict())

    loop, other = (Loop(WAYS[way], blocks=4) for _ in range(2))
    with handler_at_lines(lambda: look_at_everything(loop), every=3 * READS_EVERY) as trace:
        loop.step()
        trace.during(lambda: use(loop, tmp_path / "here"))
        loop.step()
        trace.during(loop.session.close)
    other.step()
    use(other, tmp_path / "there")
    other.step()
    other.close()
    assert trace.handled > 10
    assert [loss.item() for loss in loop.losses] == [loss.item() for loss in other.losses]
    assert loop.digest() == other.digest()
    assert digest_of(flat(loop.optimizer.state_dict())) == digest_of(flat(other.optimizer.state_dict()))


def flat(state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"{number}.{key}": value
        for number, state in state_dict["state"].items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
