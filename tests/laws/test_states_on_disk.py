"""Law: optimizer states that lie on disk give the numbers of those in RAM, bit for bit; a disk that fails ends the
session with one error, and loses nothing that was saved."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stormtorch as storm
from stormtorch.core.errors import OutOfBudget, SettingError, StorageError, StormError
from stormtorch.core.notices import forget_notices
from stormtorch.core.plan import Plan
from stormtorch.core.sizes import MiB
from stormtorch.core.tags import Tier
from stormtorch.memory.disk.calls import SystemCalls
from stormtorch.native.moves import read_at, write_at
from stormtorch.session.api import Session
from stormtorch.streams.settings import Settings, Trial
from stormtorch.streams.units import sizes
from stormtorch.streams.units.file_layout import GRAIN
from stormtorch.streams.units.unit import Unit

from ..thinning import daily
from .models import (
    CHAIN,
    LLAMA,
    MAX_NORM,
    OTHERS,
    Case,
    Side,
    adamw,
    at_home,
    frozen,
    jitter,
    one_thread,  # noqa: F401  # a fixture
    same,
    sgd,
    tight,
    train,
)

CASES = [LLAMA, *(case for case in OTHERS if case.name in ("tied", "moe", "lora", "conv", "dropout", "huggingface"))]
STEPS = daily(2, 4)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of these small models have several chunks."""
    monkeypatch.setattr(sizes, "_LEAST_CHUNK", GRAIN)
    monkeypatch.setattr(sizes, "_MOST_CHUNK", GRAIN)


@pytest.fixture(autouse=True)
def _one_order_of_adding_up() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False):
        yield


def open_on_disk(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    disk: Path | list[Path] | None,
    *,
    part: float = 1.0,
    weights: float = 0.0,
    device: torch.device | str = "cpu",
    seed: int | None = 0,
    calls: SystemCalls | None = None,
    **settings: Any,
) -> Session:
    """A session with ``part`` of its units' states on disk, and ``weights`` of their weights, in lanes that are late at
    random, with poison."""
    device = torch.device(device)
    vram = tight(model) * (4 if device.type == "cuda" else 1)
    trial = Trial(
        delay=None if seed is None else jitter(device, seed),
        poison=seed is not None,
        disk_part=part,
        weights_part=weights,
        calls=calls,
        small_bytes=1,
        device_share=0.5 if device.type == "cpu" else None,
    )
    given = Settings(**{"vram": vram, "device": str(device), "disk": disk, **settings})
    return Session(model, optimizer, given, trial=trial)


def step_of(side: Side, number: int) -> Any:
    torch.manual_seed(number)  # for dropout
    return frozen(side.step(number))


def on_disk(session: Session) -> int:
    """How many units have their states on disk."""
    return len(session._parts.ground.homes.on_disk.layouts)


@contextlib.contextmanager
def two(case: Case, disk: Path | list[Path], **more: Any) -> Iterator[tuple[Side, Side, Session]]:
    """A plain side and a streamed one."""
    dtype = more.pop("dtype", torch.float32)
    device = torch.device(more.get("device", "cpu"))
    sides = []
    for place in (device, torch.device("cpu")):
        model = case.build(dtype).to(place)
        sides.append(Side(model, at_home(adamw(model)), case, device))
    with open_on_disk(sides[1].model, sides[1].optimizer, disk, **more) as session:
        sides[1].session = session
        yield sides[0], sides[1], session


def histories(
    case: Case, disk: Path, *, parts: tuple[float | None, ...], dtype: torch.dtype, device: torch.device, **more: Any
) -> list[Any]:
    """What training leaves with these ``parts`` on disk; None: no disk."""
    loop = {name: more.pop(name) for name in ("accumulate", "clip") if name in more}
    found = []
    for part in parts:
        model = case.build(dtype)
        optimizer = adamw(model)
        given = {"disk": disk, "part": part} if part is not None else {"disk": None, "part": 0.0}
        with open_on_disk(model, optimizer, **given, device=device, **more) as session:
            assert bool(on_disk(session)) == (part is not None)
            found.append(train(case, model, optimizer, steps=STEPS, device=device, session=session, **loop))
    return found


@pytest.mark.parametrize("part", [0.3, 1.0])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_numbers_as_plain_pytorch(case: Case, part: float, tmp_path: Path, device: torch.device) -> None:
    with two(case, tmp_path, part=part, device=device) as (plain, streamed, session):
        assert on_disk(session)
        for number in range(STEPS):
            same(step_of(streamed, number), step_of(plain, number), "loss")
        same(streamed.model.state_dict(), plain.model.state_dict(), "weights")
        same(frozen(streamed.optimizer.state_dict()), frozen(plain.optimizer.state_dict()), "states")
        session.ledger.check()
    same(frozen(streamed.optimizer.state_dict()), frozen(plain.optimizer.state_dict()), "states after close")


LOOPS: list[dict[str, Any]] = [
    {"step": "forward"},
    {"step": "forward", "clip": "torch"},
    {"step": "forward", "clip": "session"},
    {"step": "forward", "accumulate": 3},
    {"step": "backward"},
    {"step": "serial", "clip": "session", "accumulate": 2},
]


@pytest.mark.daily("torch.float32", "forward-torch.float16")  # test_weights_on_disk.py has bf16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: "-".join(map(str, loop.values())))
def test_same_as_in_ram(loop: dict[str, Any], dtype: torch.dtype, tmp_path: Path, device: torch.device) -> None:
    ram, some, every = histories(LLAMA, tmp_path, parts=(None, 0.3, 1.0), dtype=dtype, device=device, **loop)
    some.check(ram)
    every.check(ram)


@pytest.mark.daily("offload")
@pytest.mark.parametrize("activations", ["offload", "recompute", "auto"])
def test_with_activations(activations: str, tmp_path: Path, device: torch.device) -> None:
    ram, every = histories(
        LLAMA, tmp_path, parts=(None, 1.0), dtype=torch.bfloat16, device=device, activations=activations
    )
    every.check(ram)


def test_groups_with_settings_of_their_own(tmp_path: Path, device: torch.device) -> None:
    """Matrices decay and vectors do not: one chunk has updates of both."""

    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
        return torch.optim.AdamW(groups, lr=1e-2, fused=True)

    found = []
    for part in (None, 1.0):
        model = LLAMA.build(torch.bfloat16)
        optimizer = grouped(model)
        disk = tmp_path if part else None
        with open_on_disk(model, optimizer, disk, part=part or 0.0, device=device) as session:
            found.append(train(LLAMA, model, optimizer, steps=STEPS, device=device, session=session))
    found[1].check(found[0])


def test_several_directories(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with two(CHAIN, folders) as (plain, streamed, session):
        for number in range(3):
            same(step_of(streamed, number), step_of(plain, number), "loss")
        files = {r.number for unit in _units(session) for chunk in unit.chunks for r in chunk.ranges}
        assert len(files) == 2
    same(streamed.model.state_dict(), plain.model.state_dict(), "weights")


def _units(session: Session) -> list[Any]:
    home: Any = session._parts.adam.state_home  # type: ignore[union-attr]
    return list(home._units.values())


def test_odd_optimizers_keep_their_states_in_ram(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    forget_notices()
    model = CHAIN.build()
    with storm.stream(model, sgd(model), vram=tight(model), device="cpu", disk=tmp_path) as session:
        assert not on_disk(session)
    assert "disk= holds the states of Adam" in caplog.text


class _Branches(nn.Module):
    """Blocks of which the last one is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(16))

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        for block in self.blocks[:used]:
            x = x + torch.as_tensor(block(x))
        return x


def test_a_late_update_has_its_own_clip_factor(tmp_path: Path) -> None:
    """The disk holds up one unit's update, and many steps without that unit are clipped meanwhile."""
    go, held = threading.Event(), set[int]()

    def late(fd: int, view: memoryview, offset: int) -> int:
        if offset in held:
            assert go.wait(60)
        return read_at(fd, view, offset)

    def trained(disk: Path | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = _Branches()
        optimizer = adamw(model)
        with open_on_disk(
            model, optimizer, disk, part=1.0 if disk else 0.0, seed=None, calls=SystemCalls(pread=late)
        ) as session:
            if disk is not None:
                held.update(r.offset for r in _units(session)[-1].chunks[0].ranges)
            for number in range(70):
                model(torch.full((2, 64), 0.1 / (number + 1)), 16 if number == 0 else 3).square().sum().backward()
                session.clip_grad_norm_(MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            go.set()
            session.synchronize()
            return [p.detach().clone() for p in model.parameters()]

    ram = trained(None)
    go.clear()
    timer = threading.Timer(3.0, go.set)  # training may have to wait for that update
    timer.start()
    disk = trained(tmp_path)
    timer.cancel()
    assert all(map(torch.equal, disk, ram))


# --- user code between two steps


def _read(side: Side) -> Any:
    return [side.optimizer.state[p]["exp_avg"].norm() for p in side.model.parameters()]


def _write(side: Side) -> None:
    for p in side.model.parameters():
        side.optimizer.state[p]["exp_avg"].mul_(0.5)


def _replace(side: Side) -> None:
    p = next(iter(side.model.parameters()))
    side.optimizer.state[p]["exp_avg_sq"] = torch.full_like(side.optimizer.state[p]["exp_avg_sq"], 0.25)


def _clear(side: Side) -> None:
    side.optimizer.state.clear()


def _reload(side: Side) -> None:
    side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))


def _rewrite(side: Side) -> None:
    with torch.no_grad():
        list(side.model.parameters())[3].mul_(0.5)


@pytest.mark.parametrize("act", [_read, _write, _replace, _clear, _reload, _rewrite], ids=lambda act: act.__name__)
def test_user_code_between_steps(act: Callable[[Side], Any], tmp_path: Path, device: torch.device) -> None:
    with two(CHAIN, tmp_path, device=device) as (plain, streamed, _):
        for number in range(6):
            same(step_of(streamed, number), step_of(plain, number), "loss")
            if number % 2:
                same(frozen(act(streamed)), frozen(act(plain)), "what user code sees")
        same(frozen(streamed.optimizer.state_dict()), frozen(plain.optimizer.state_dict()), "states")
    same(streamed.model.state_dict(), plain.model.state_dict(), "weights")


def test_training_goes_on_after_close(tmp_path: Path) -> None:
    """States that were on disk are ordinary tensors then; another session takes them over."""
    with two(CHAIN, tmp_path) as (plain, streamed, _):
        for number in range(2):
            same(step_of(streamed, number), step_of(plain, number), "loss")
    streamed.session = None
    same(step_of(streamed, 2), step_of(plain, 2), "loss in plain PyTorch")
    with open_on_disk(streamed.model, streamed.optimizer, tmp_path):
        same(step_of(streamed, 3), step_of(plain, 3), "loss in a second session")
    same(frozen(streamed.optimizer.state_dict()), frozen(plain.optimizer.state_dict()), "states")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_states_after_close_have_the_dtypes_of_the_weights(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stormtorch.streams.optimizer.adam.shown._AT_ONCE", 100)
    left = []
    for disk in (None, tmp_path):
        model = CHAIN.build(dtype)
        side = Side(model, adamw(model), CHAIN, torch.device("cpu"))
        with open_on_disk(model, side.optimizer, disk, part=float(disk is not None)) as side.session:
            for number in range(2):
                step_of(side, number)
        left.append(frozen(side.optimizer.state_dict()))
        assert {state["exp_avg"].dtype for state in side.optimizer.state.values()} == {dtype}
    same(left[1], left[0], "states")


def test_states_that_nothing_will_use_are_not_read_again(tmp_path: Path) -> None:
    """As at the end of `storm train`: closing moves no states, and the model is ordinary."""
    with two(CHAIN, tmp_path, dtype=torch.bfloat16) as (_, streamed, session):
        for number in range(2):
            streamed.step(number)
        session.synchronize()
        session._keeps_states = False
        before = _units(session)[0].regions[0].bytes.clone()
        mapped = _units(session)[0].regions[0].bytes
    assert torch.equal(mapped, before), "states were narrowed"
    assert not streamed.optimizer.state
    CHAIN.loss(streamed.model, CHAIN.batch(0))


# --- checkpoints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("before", [None, 0.3, 1.0])
@pytest.mark.parametrize("after", [None, 0.3, 1.0])
def test_resume_between_any_two(
    before: float | None, after: float | None, dtype: torch.dtype, tmp_path: Path, device: torch.device
) -> None:
    case = CHAIN

    def opened(part: float | None) -> tuple[Side, Session]:
        model = case.build(dtype)
        side = Side(model, adamw(model), case, device)
        disk = tmp_path if part is not None else None
        session = open_on_disk(model, side.optimizer, disk, part=part or 0.0, device=device)
        side.session = session
        return side, session

    side, session = opened(before)
    with session:
        for number in range(2):
            side.step(number)
        session.save(tmp_path / "saved")
        expected = [step_of(side, number) for number in range(2, 5)]
        weights = frozen(side.model.state_dict())
        states = frozen(side.optimizer.state_dict())
    side, session = opened(after)
    with session:
        session.load(tmp_path / "saved")
        same([step_of(side, number) for number in range(2, 5)], expected, "losses")
        same(frozen(side.model.state_dict()), weights, "weights")
        same(frozen(side.optimizer.state_dict()), states, "states")


def test_a_save_in_the_background(tmp_path: Path) -> None:
    """Training goes on while states are read from the disk; the checkpoint has those of the moment of the call."""

    def slowly(fd: int, view: memoryview, offset: int) -> int:
        time.sleep(2e-3)
        return read_at(fd, view, offset)

    calls = SystemCalls(pread=slowly)
    with two(CHAIN, tmp_path, calls=calls) as (plain, streamed, session):
        for number in range(2):
            streamed.step(number), plain.step(number)
        session.save(tmp_path / "saved", wait=False)
        for number in range(2, 4):
            same(step_of(streamed, number), step_of(plain, number), "loss beside the save")
        session.synchronize()
        session.load(tmp_path / "saved")
        again = CHAIN.build()
        other = Side(again, adamw(again), CHAIN, torch.device("cpu"))
        for number in range(2):
            other.step(number)
        same(frozen(streamed.optimizer.state_dict()), frozen(other.optimizer.state_dict()), "saved states")


# --- budgets


def _needed(model: nn.Module) -> dict[str, int]:
    """RAM with all states in RAM, and without any."""
    with open_on_disk(model, adamw(model), None, part=0.0, seed=None) as session:
        total = sum(session._parts.ground.homes.needed.values())
        states = sum(session._parts.ground.homes.states)
    return {"total": total, "states": states}


def large() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))


def test_the_disk_takes_what_ram_has_no_room_for() -> None:
    import tempfile

    needed = _needed(large())
    for share in (0.25, 0.6):
        ram = needed["total"] - int(share * needed["states"])
        model = large()
        with tempfile.TemporaryDirectory() as folder:
            with open_on_disk(model, adamw(model), Path(folder), part=0.0, ram=ram) as session:
                found, plan = on_disk(session) / len(session.units), session.plan
                assert share <= found <= share + 0.2
                model(torch.ones(2, 512)).sum().backward()
                session.synchronize()
                assert session.ledger.peak_bytes(Tier.HOST) <= ram
            assert plan.disk is not None
            assert {unit.states.home for unit in plan.units if unit.states} == {Tier.HOST, Tier.DISK}
            assert Plan.from_json(plan.to_json()) == plan
            assert "RAM has no room" in str(plan)


def test_sums_of_micro_batches_have_room(tmp_path: Path) -> None:
    """A budget that has room for fp32 sums if more states lie on disk than RAM alone would ask for."""
    found = []
    needed = _needed(large().to(torch.bfloat16))["total"]
    for ram in (1 << 30, needed - MiB):
        model = large().to(torch.bfloat16)
        optimizer = adamw(model)
        with open_on_disk(model, optimizer, tmp_path, part=0.0, ram=ram, seed=None) as session:
            for number in range(6):
                x = torch.randn(4, 512, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
                (model(x).float().square().mean() / 2).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            assert bool(on_disk(session)) == (ram < needed)
            session.ledger.check()
            found.append(frozen(model.state_dict()))
    same(found[1], found[0], "weights")


def test_without_a_disk_the_refusal_says_what_one_would_do() -> None:
    model = large()
    needed = _needed(model)
    with pytest.raises(OutOfBudget, match=r"or give disk= a directory: with .* there, \d+[KM]iB suffice"):
        open_on_disk(model, adamw(model), None, part=0.0, ram=needed["total"] - MiB)


def test_what_it_says_would_suffice_does(tmp_path: Path) -> None:
    model = large()
    needed = _needed(model)
    with pytest.raises(OutOfBudget) as refusal:
        open_on_disk(model, adamw(model), None, part=0.0, ram=needed["total"] - MiB)
    least = str(refusal.value).split(" suffice")[0].split()[-1]
    with open_on_disk(model, adamw(model), tmp_path, part=0.0, ram=least) as session:
        assert on_disk(session) == len(session.units)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_refusal_where_no_streamed_parameter_is_trained(on_disk: bool, tmp_path: Path) -> None:
    """All that the optimizer has remains on the device: a disk has nothing to hold."""
    model = large().requires_grad_(False)
    optimizer = torch.optim.AdamW(model[11].requires_grad_(True).parameters())  # type: ignore[index]
    with pytest.raises(OutOfBudget, match=r"Raise it to at least \d+[KM]iB, or train"):
        storm.stream(model, optimizer, ram=MiB, device="cpu", disk=tmp_path if on_disk else None, leave=["11"])


def test_too_little_disk(tmp_path: Path) -> None:
    model = large()
    with pytest.raises(OutOfBudget, match=r"Cannot hold .* of optimizer states on disk .*disk_limit='1MiB'"):
        open_on_disk(model, adamw(model), tmp_path, disk_limit="1MiB")
    model(torch.ones(2, 512))  # ordinary still


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"disk": "/nowhere/at/all"}, "is not a directory"),
        ({"disk": 7}, "Accepted: a directory, or a list"),
        ({"disk": None, "disk_limit": "1GiB"}, "needs disk="),
        ({"disk_limit": "many"}, "disk_limit"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = CHAIN.build()
    with pytest.raises(SettingError, match=message):
        storm.stream(model, adamw(model), device="cpu", vram="1MiB", **{"disk": tmp_path, **settings})


# --- disks that fail


class Failing:
    """Calls of one kind that fail once ``broken`` is set."""

    def __init__(self, where: str, code: int) -> None:
        self.broken, self._code, self._call = False, code, read_at if where == "pread" else write_at
        self.calls = dataclasses.replace(SystemCalls(), **{where: self._fail})  # type: ignore[arg-type]

    def _fail(self, fd: int, view: memoryview, offset: int) -> int:
        if self.broken:
            raise OSError(self._code, os.strerror(self._code))
        return self._call(fd, view, offset)


def _train_on(side: Side) -> None:
    for number in range(2, 5):
        side.step(number)


def ends_by_an_io_error(
    where: str, disk: Path, match: str, *, device: torch.device, step: str, **settings: Any
) -> None:
    """Access to the disk fails in the third step. ``settings`` are those of `open_on_disk`."""
    model = LLAMA.build()
    side = Side(model, adamw(model), LLAMA, device)
    failing = Failing(where, errno.EIO)
    session = open_on_disk(model, side.optimizer, disk, device=device, calls=failing.calls, step=step, **settings)
    side.session = session
    side.step(0)
    session.save(disk / "saved")
    saved = frozen(model.state_dict())
    side.step(1)
    failing.broken = True
    with pytest.raises(StorageError, match=match):
        _train_on(side)
    with pytest.raises(StormError, match="I/O error"):
        session.save(disk / "never")
    assert not (disk / "never").exists()
    with contextlib.suppress(StormError):
        session.close()
    fresh = LLAMA.build()
    with open_on_disk(fresh, adamw(fresh), disk, device=device, **settings) as again:
        again.load(disk / "saved")
        same(frozen(fresh.state_dict()), saved, "the saved weights")


@pytest.mark.parametrize("step", ["forward", "backward"])
@pytest.mark.parametrize("where", ["pread", "pwrite"])
def test_an_io_error_ends_the_session(where: str, step: str, tmp_path: Path, device: torch.device) -> None:
    """One clear error within two steps, no hang; what was saved before loads exactly."""
    ends_by_an_io_error(
        where, tmp_path, r"optimizer states.*I/O error.*load the last checkpoint", device=device, step=step
    )


@pytest.mark.parametrize("where", ["pread", "pwrite"])
def test_close_after_an_io_error_leaves_no_states_of_the_disk(where: str, tmp_path: Path) -> None:
    """The model trains on, with the states that lie in RAM; those on disk begin at zero."""
    model = LLAMA.build(torch.bfloat16)
    side = Side(model, adamw(model), LLAMA, torch.device("cpu"))
    disk = Failing(where, errno.EIO)
    side.session = session = open_on_disk(model, side.optimizer, tmp_path, part=0.3, calls=disk.calls)
    side.step(0), side.step(1)
    lying = {id(p.parameter) for unit in session.units for p in unit.places if _is_on_disk(session, unit)}
    disk.broken = True
    with pytest.raises(StorageError) as raised:
        _train_on(side)
    assert raised.value.errno == errno.EIO
    with pytest.raises(StorageError, match="I/O error"):
        session.close()
    side.session = None
    states = side.optimizer.state
    assert {id(p) for p in model.parameters()} - {id(p) for p in states} == lying
    assert {type(value) for state in states.values() for value in state.values()} == {torch.Tensor}
    side.step(2)


def _is_on_disk(session: Session, unit: Unit) -> bool:
    return unit.index in session._parts.ground.homes.on_disk.layouts


def test_a_full_disk_is_found_at_the_start(tmp_path: Path) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = CHAIN.build()
    with pytest.raises(StorageError, match=r"preallocate .* no space is left"):
        open_on_disk(model, adamw(model), tmp_path, calls=SystemCalls(fallocate=full))
    assert not list(tmp_path.iterdir())
    model(CHAIN.batch(0)[0])


def test_nothing_is_left_in_the_directory(tmp_path: Path) -> None:
    """The scratch file has no name, so that a kill leaves nothing, and two runs share a directory."""
    with two(CHAIN, tmp_path) as (plain, streamed, _), two(CHAIN, tmp_path) as (_, other, _):
        for number in range(2):
            expected = step_of(plain, number)
            same(step_of(streamed, number), expected, "loss")
            same(step_of(other, number), expected, "loss of the other session")
        assert not list(tmp_path.iterdir())


def _descriptors() -> int:
    gc.collect()  # sessions of other tests
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_do_not_grow_with_units(tmp_path: Path) -> None:
    """A scratch file and its mapping are open, however many units lie there; a few after close, for `optimizer.state`,
    and none when that is dropped."""
    before = _descriptors()
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(40)))
    optimizer = adamw(model)
    with open_on_disk(model, optimizer, tmp_path) as session:
        assert on_disk(session) == len(session.units) > 8
        assert _descriptors() - before <= 5
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
    assert _descriptors() - before <= 1
    optimizer.state.clear()
    del session
    assert _descriptors() <= before


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # Python says so itself
def test_a_session_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    def dropped() -> tuple[int, int]:
        model = CHAIN.build()
        side = Side(model, adamw(model), CHAIN, torch.device("cpu"))
        side.session = open_on_disk(model, side.optimizer, tmp_path, seed=None)
        side.step(0)
        del model, side
        return _descriptors(), len(list(Path("/proc/self/task").iterdir()))

    descriptors, threads = dropped()
    more_descriptors, more_threads = dropped()
    assert more_descriptors <= descriptors
    assert more_threads <= threads


def test_a_directory_that_vanishes(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    with two(CHAIN, folder) as (plain, streamed, _):
        streamed.step(0), plain.step(0)
        folder.rmdir()
        same(step_of(streamed, 1), step_of(plain, 1), "loss")


def test_a_disk_in_ram_is_said(caplog: pytest.LogCaptureFixture) -> None:
    forget_notices()
    model = CHAIN.build()
    with open_on_disk(model, adamw(model), Path("/dev/shm")):
        pass
    assert "tmpfs lives in RAM" in caplog.text


def test_a_network_filesystem_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    forget_notices()
    model = CHAIN.build()
    with open_on_disk(model, adamw(model), tmp_path, calls=SystemCalls(filesystem_type=lambda _: "nfs4")):
        pass
    assert "is on nfs4, which is not a disk of this machine" in caplog.text


def test_a_slow_disk(tmp_path: Path) -> None:
    def slowly(fd: int, view: memoryview, offset: int) -> int:
        time.sleep(1e-3)
        return write_at(fd, view, offset)

    with two(CHAIN, tmp_path, calls=SystemCalls(pwrite=slowly)) as (plain, streamed, session):
        for number in range(3):
            same(step_of(streamed, number), step_of(plain, number), "loss")
        session.synchronize()
        report = session.report()
        assert report.disk is not None
        states = session._parts.ground.homes.on_disk.disk_bytes
        assert report.disk.read_bytes == pytest.approx(states, rel=0.5)
        assert report.disk.written_bytes == pytest.approx(states, rel=0.5)
        assert "written per 1,000 steps" in str(report)
