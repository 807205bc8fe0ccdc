"""Law: trained weights that lie on disk beside their states give the numbers of those in RAM, bit for bit, to training,
to user code and to checkpoints; a disk that fails ends the session with one error."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stormtorch as storm
from stormtorch.core.errors import OutOfBudget, StormError
from stormtorch.core.plan import Plan
from stormtorch.core.sizes import MiB
from stormtorch.core.tags import Tier
from stormtorch.memory.disk.calls import SystemCalls
from stormtorch.native.moves import read_at
from stormtorch.session.api import Session
from stormtorch.streams.units import sizes
from stormtorch.streams.units.unit import Unit

from .models import CHAIN, LLAMA, OTHERS, Case, Side, adamw, frozen, same, tight, train
from .test_states_on_disk import (
    LOOPS,
    STEPS,
    _one_order_of_adding_up,  # noqa: F401  # a fixture
    ends_by_an_io_error,
    large,
    on_disk,
    open_on_disk,
    small_chunks,  # noqa: F401  # a fixture
    step_of,
    two,
)

CASES = [LLAMA, *(case for case in OTHERS if case.name in ("tied", "moe", "conv", "dropout"))]


@pytest.fixture
def larger_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few in each unit of `large`."""
    monkeypatch.setattr(sizes, "_LEAST_CHUNK", 1 << 17)
    monkeypatch.setattr(sizes, "_MOST_CHUNK", 1 << 17)


def there(session: Session) -> list[Unit]:
    """The units whose weights lie on disk."""
    return [session.units[index] for index in session._parts.ground.homes.on_disk.weights]


@pytest.mark.daily("llama-1.0", "tied-0.3", "moe-1.0", "conv-0.3")
@pytest.mark.parametrize("weights", [0.3, 1.0])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_numbers_as_plain_pytorch(case: Case, weights: float, tmp_path: Path, device: torch.device) -> None:
    with two(case, tmp_path, weights=weights, device=device) as (plain, streamed, session):
        assert (len(there(session)) == len(session.units)) == (weights == 1.0)
        for number in range(STEPS):
            same(step_of(streamed, number), step_of(plain, number), "loss")
        same(streamed.model.state_dict(), plain.model.state_dict(), "weights")
        same(frozen(streamed.optimizer.state_dict()), frozen(plain.optimizer.state_dict()), "states")
        session.ledger.check()
    same(streamed.model.state_dict(), plain.model.state_dict(), "weights after close")
    same(frozen(streamed.optimizer.state_dict()), frozen(plain.optimizer.state_dict()), "states after close")


def histories(dtype: torch.dtype, disk: Path, parts: tuple[float, ...], **more: Any) -> list[Any]:
    """What training leaves with these parts of the weights on disk; 0: all in RAM, and no disk."""
    loop = {name: more.pop(name) for name in ("accumulate", "clip") if name in more}
    found = []
    for weights in parts:
        model = LLAMA.build(dtype)
        optimizer = adamw(model)
        given = {"disk": disk, "weights": weights} if weights else {"disk": None, "part": 0.0}
        with open_on_disk(model, optimizer, **given, **more) as session:
            assert bool(there(session)) == bool(weights)
            found.append(train(LLAMA, model, optimizer, steps=STEPS, device=session.device, session=session, **loop))
    return found


@pytest.mark.daily("torch.bfloat16", "backward-torch.float16", "forward-3-torch.float32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: "-".join(map(str, loop.values())))
def test_same_as_in_ram(loop: dict[str, Any], dtype: torch.dtype, tmp_path: Path, device: torch.device) -> None:
    ram, some, every = histories(dtype, tmp_path, (0.0, 0.3, 1.0), device=device, **loop)
    some.check(ram)
    every.check(ram)


@pytest.mark.daily("offload")
@pytest.mark.parametrize("activations", ["offload", "recompute", "auto"])
def test_with_activations(activations: str, tmp_path: Path, device: torch.device) -> None:
    ram, every = histories(torch.bfloat16, tmp_path, (0.0, 1.0), device=device, activations=activations)
    every.check(ram)


def test_gradients_in_a_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least RAM: neither weights nor gradients nor states have a home there."""
    always = sizes.homes_for
    monkeypatch.setattr(
        "stormtorch.session.resources.homes_for", lambda *args, **more: always(*args, always_ring=True, **more)
    )
    ram, every = histories(torch.bfloat16, tmp_path, (0.0, 1.0), step="backward")
    every.check(ram)


def test_several_directories(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with two(CHAIN, folders, weights=1.0) as (plain, streamed, session):
        for number in range(3):
            same(step_of(streamed, number), step_of(plain, number), "loss")
        assert len({p.stored.where.file.number for unit in there(session) for p in unit.places if p.stored}) == 2
        assert session.ledger.peak_bytes(Tier.DISK) == session._parts.ground.homes.on_disk.disk_bytes
    same(streamed.model.state_dict(), plain.model.state_dict(), "weights")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_unit_with_weights_that_are_not_trained(dtype: torch.dtype, tmp_path: Path) -> None:
    found, losses = [], []
    for weights in (0.0, 1.0):
        model = LLAMA.build(dtype)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" not in name)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
        disk = tmp_path if weights else None
        with open_on_disk(model, optimizer, disk, part=weights, weights=weights) as session:
            if weights:
                assert any(not place.trained for unit in there(session) for place in unit.places)
            found.append(train(LLAMA, model, optimizer, steps=STEPS, session=session, device=torch.device("cpu")))
            with torch.no_grad():
                for parameter in model.parameters():
                    if not parameter.requires_grad:
                        parameter.mul_(0.5)
            losses.append(LLAMA.loss(model, LLAMA.batch(9)).detach())
    found[1].check(found[0])
    same(losses[1], losses[0], "loss after a write to weights that are not trained")


# --- user code between two steps


def _read(side: Side) -> Any:
    return [p.norm() for p in side.model.parameters()]


def _write(side: Side) -> None:
    with torch.no_grad():
        for number, p in enumerate(side.model.parameters()):
            if number % 3 == 0:
                p.mul_(0.5)
            elif number % 3 == 1:
                p.data[:1] = 0.25


def _replace(side: Side) -> None:
    p = list(side.model.parameters())[2]
    p.data = torch.full_like(p, 0.125)


def _swap(side: Side) -> Any:
    """As code that evaluates averaged weights: others come, and the trained ones come back."""
    kept = [p.data for p in side.model.parameters()]
    for p in side.model.parameters():
        p.data = torch.zeros_like(p)
    loss = CHAIN.loss(side.model, tuple(x.to(side.device) for x in CHAIN.batch(3))).detach().cpu()
    for p, data in zip(side.model.parameters(), kept, strict=True):
        p.data = data
    return loss


def _reload(side: Side) -> None:
    side.model.load_state_dict({name: value.clone() * 0.5 for name, value in side.model.state_dict().items()})


def _keep_a_view(side: Side) -> Any:
    views = vars(side).setdefault("views", [p.data for p in side.model.parameters()])
    with torch.no_grad():
        views[1].add_(0.01)
    return [view.sum() for view in views]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", [_read, _write, _replace, _swap, _reload, _keep_a_view], ids=lambda act: act.__name__)
def test_user_code_between_steps(
    act: Callable[[Side], Any], dtype: torch.dtype, tmp_path: Path, device: torch.device
) -> None:
    """The same as with weights in RAM: for bf16, plain PyTorch has no masters."""
    found = []
    for weights in (0.0, 1.0):
        model = CHAIN.build(dtype)
        side = Side(model, adamw(model), CHAIN, device)
        disk = tmp_path if weights else None
        with open_on_disk(model, side.optimizer, disk, part=weights, weights=weights, device=device) as side.session:
            seen = []
            for number in range(5):
                seen.append(step_of(side, number))
                seen.append(frozen(act(side)))
        found.append((seen, frozen(model.state_dict()), frozen(side.optimizer.state_dict())))
    same(found[1], found[0], "what user code sees")


def test_an_array_that_user_code_writes_to(tmp_path: Path) -> None:
    """Through memory that numpy has: loads and updates see it, as in RAM."""
    with two(CHAIN, tmp_path, weights=1.0) as (plain, streamed, _):
        for number in range(4):
            same(step_of(streamed, number), step_of(plain, number), "loss")
            for side in (plain, streamed):
                for parameter in list(side.model.parameters())[:5]:
                    parameter.detach().numpy()[:] *= 0.5
    same(streamed.model.state_dict(), plain.model.state_dict(), "weights")


def test_training_goes_on_after_close(tmp_path: Path) -> None:
    with two(CHAIN, tmp_path, weights=1.0) as (plain, streamed, _):
        for number in range(2):
            same(step_of(streamed, number), step_of(plain, number), "loss")
    streamed.session = None
    same(step_of(streamed, 2), step_of(plain, 2), "loss in plain PyTorch")
    with open_on_disk(streamed.model, streamed.optimizer, tmp_path, weights=1.0):
        same(step_of(streamed, 3), step_of(plain, 3), "loss in a second session")
    same(streamed.model.state_dict(), plain.model.state_dict(), "weights")


# --- checkpoints

PLACES = {"ram": None, "states": {"weights": 0.0}, "some": {"weights": 0.3}, "all": {"weights": 1.0}}


@pytest.mark.daily("all-ram", "ram-all", "states-all", "all-some")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("before", list(PLACES))
@pytest.mark.parametrize("after", list(PLACES))
def test_resume_between_any_two(
    before: str, after: str, dtype: torch.dtype, tmp_path: Path, device: torch.device
) -> None:
    def opened(place: str) -> tuple[Side, Session]:
        model = CHAIN.build(dtype)
        side = Side(model, adamw(model), CHAIN, device)
        given = PLACES[place]
        settings = {"disk": None, "part": 0.0} if given is None else {"disk": tmp_path, **given}
        side.session = session = open_on_disk(model, side.optimizer, device=device, **settings)
        return side, session

    side, session = opened(before)
    with session:
        for number in range(2):
            side.step(number)
        session.save(tmp_path / "saved")
        expected = [step_of(side, number) for number in range(2, 5)]
        weights, states = frozen(side.model.state_dict()), frozen(side.optimizer.state_dict())
    side, session = opened(after)
    with session:
        session.load(tmp_path / "saved")
        same([step_of(side, number) for number in range(2, 5)], expected, "losses")
        same(frozen(side.model.state_dict()), weights, "weights")
        same(frozen(side.optimizer.state_dict()), states, "states")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_are_loaded_into_a_meta_model(dtype: torch.dtype, tmp_path: Path) -> None:
    """`load_weights` converts on the way; a parameter without values is refused before it has some."""
    source = CHAIN.build()
    with open_on_disk(source, adamw(source), None, part=0.0) as session:
        session.save(tmp_path / "saved")
    expected = {name: value.to(dtype) for name, value in source.state_dict().items()}
    with torch.device("meta"):
        model = CHAIN.build(dtype)
    optimizer = adamw(model)
    with open_on_disk(model, optimizer, tmp_path, weights=1.0, vram=tight(source)):
        with pytest.raises(StormError, match="no values"):
            CHAIN.loss(model, CHAIN.batch(0))
        storm.checkpoint.load_weights(model, tmp_path / "saved")
        same(frozen(model.state_dict()), expected, "loaded weights")
        CHAIN.loss(model, CHAIN.batch(0)).backward()
        optimizer.step()
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_a_save_in_the_background(tmp_path: Path) -> None:
    """Training goes on while weights are read from the disk; the checkpoint has those of the moment of the call."""

    def slowly(fd: int, view: memoryview, offset: int) -> int:
        time.sleep(2e-3)
        return read_at(fd, view, offset)

    with two(CHAIN, tmp_path, weights=1.0, calls=SystemCalls(pread=slowly)) as (plain, streamed, session):
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
        same(frozen(streamed.model.state_dict()), frozen(again.state_dict()), "saved weights")


# --- budgets


def _needed(model: nn.Module, disk: Path, **more: Any) -> dict[str, Any]:
    with open_on_disk(model, adamw(model), disk, seed=None, **more) as session:
        homes = session._parts.ground.homes
        return {"total": sum(homes.needed.values()), "weights": sum(homes.parameters)}


@pytest.mark.usefixtures("larger_chunks")
def test_weights_follow_when_all_states_are_there(tmp_path: Path) -> None:
    states, every = _needed(large(), tmp_path), _needed(large(), tmp_path, weights=1.0)
    assert every["weights"] == 0
    for share in (0.25, 0.6):
        ram = int(states["total"] - share * (states["total"] - every["total"]))
        model = large()
        with open_on_disk(model, adamw(model), tmp_path, part=0.0, ram=ram) as session:
            assert on_disk(session) == len(session.units)
            assert share - 0.1 <= len(there(session)) / len(session.units) <= share + 0.25
            plan = session.plan
            model(torch.ones(2, 512)).sum().backward()
            session.synchronize()
            assert session.ledger.peak_bytes(Tier.HOST) <= ram
        assert {unit.weights.home for unit in plan.units} == {Tier.HOST, Tier.DISK}
        assert plan.disk is not None
        assert plan.disk.trained_bytes > 0
        assert "of trained weights" in str(plan)
        assert "the weights of" in str(plan)
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.usefixtures("larger_chunks")
@pytest.mark.parametrize("step", ["forward", "backward"])
def test_what_a_refusal_says_would_suffice_does(step: str, tmp_path: Path) -> None:
    for disk in (None, tmp_path):
        model = large()
        with pytest.raises(OutOfBudget) as refusal:
            open_on_disk(model, adamw(model), disk, part=0.0, ram=MiB, step=step)
        line = str(refusal.value)
        before, after = ("(with all weights there too, ", ")") if disk is None else ("Raise it to at least ", ", ")
        least = line.split(before)[1].split(after, maxsplit=1)[0]
        with open_on_disk(model, adamw(model), tmp_path, part=0.0, ram=least, step=step) as session:
            assert len(there(session)) == len(session.units)
            model(torch.ones(2, 512)).sum().backward()


def test_too_little_disk(tmp_path: Path) -> None:
    model = large()
    with pytest.raises(OutOfBudget, match=r"Cannot hold .* of optimizer states and weights on disk .*disk_limit"):
        open_on_disk(model, adamw(model), tmp_path, weights=1.0, disk_limit="1MiB")
    model(torch.ones(2, 512))  # ordinary still


# --- disks that fail


def _train_on(side: Side) -> None:
    for number in range(2, 6):
        side.step(number)


@pytest.mark.parametrize("step", ["forward", "backward"])
@pytest.mark.parametrize("where", ["pread", "pwrite"])
def test_an_io_error_ends_the_session(where: str, step: str, tmp_path: Path, device: torch.device) -> None:
    """One clear error within a few steps, no hang; what was saved before loads exactly."""
    ends_by_an_io_error(where, tmp_path, "I/O error", device=device, step=step, weights=1.0)


def test_nothing_is_left_and_descriptors_do_not_grow(tmp_path: Path) -> None:
    """Two scratch files and their mappings; one after close for the states, one for the weights, until they go."""

    def descriptors() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(40)))
    optimizer = adamw(model)
    with open_on_disk(model, optimizer, tmp_path, weights=1.0) as session:
        assert len(there(session)) == len(session.units) > 8
        assert descriptors() - before <= 9
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
        assert not list(tmp_path.iterdir())
    assert descriptors() - before <= 2
    optimizer.state.clear()
    del session, model, optimizer
    assert descriptors() <= before


@pytest.mark.usefixtures("larger_chunks")
def test_the_report_counts_weights(tmp_path: Path) -> None:
    """A step reads them three times, in forward, in backward and for the update, and writes them once."""
    found = []
    for weights in (0.0, 1.0):
        model = large()
        optimizer = adamw(model)
        with open_on_disk(model, optimizer, tmp_path, weights=weights, vram=tight(model)) as session:
            for _ in range(2):
                model(torch.ones(2, 512)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            session.synchronize()
            found.append(session.report().disk)
    assert found[0] is not None
    assert found[1] is not None
    size = sum(p.nbytes for p in large().parameters())
    assert found[1].written_bytes - found[0].written_bytes == pytest.approx(size, rel=0.1)
    assert size < found[1].read_bytes - found[0].read_bytes <= 3.5 * size
