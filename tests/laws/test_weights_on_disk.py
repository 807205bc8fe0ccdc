"""Law: trained weights that lie on disk beside their states give the numbers of those in RAM, bit for bit, to training,
to user code and to checkpoints; a disk that fails ends the session with one error."""

from __future__ import annotations

import contextlib
import errno
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch.core.errors import OutOfBudget, StorageError, StormError
from stormtorch.core.plan import Plan
from stormtorch.core.sizes import MiB
from stormtorch.core.tags import Tier
from stormtorch.session.api import Session
from stormtorch.streams.units.unit import Unit

from .models import CHAIN, LLAMA, OTHERS, Case, Side, adamw, frozen, same, train
from .test_states_on_disk import (
    LOOPS,
    STEPS,
    Failing,
    _one_order_of_adding_up,  # noqa: F401  # a fixture
    large,
    on_disk,
    open_on_disk,
    small_chunks,  # noqa: F401  # a fixture
    step_of,
    two,
)

CASES = [LLAMA, *(case for case in OTHERS if case.name in ("tied", "moe", "conv", "dropout"))]


def there(session: Session) -> list[Unit]:
    """The units whose weights lie on disk."""
    return [session.units[index] for index in session._parts.ground.homes.on_disk.weights]


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
    from stormtorch.streams.units import sizes

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
        assert len({place.stored.where.file.number for unit in there(session) for place in unit.places}) == 2
        assert session.ledger.peak_bytes(Tier.DISK) == session._parts.ground.homes.on_disk.disk_bytes
    same(streamed.model.state_dict(), plain.model.state_dict(), "weights")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_unit_with_weights_that_are_not_trained(dtype: torch.dtype, tmp_path: Path) -> None:
    found = []
    for weights in (0.0, 1.0):
        model = LLAMA.build(dtype)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(hash(name[-8:-6]) >= 0 and "norm" not in name)
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
            found[-1].losses.append(float(LLAMA.loss(model, LLAMA.batch(9))))
    found[1].check(found[0])
    assert found[1].losses == found[0].losses


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
    loss = CHAIN.loss(side.model, CHAIN.batch(3, device=side.device)).detach().cpu()
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
@pytest.mark.parametrize(
    "act", [_read, _write, _replace, _swap, _reload, _keep_a_view], ids=lambda act: act.__name__
)
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
        arrays = [next(iter(side.model.parameters())).detach().numpy() for side in (plain, streamed)]
        for number in range(3):
            same(step_of(streamed, number), step_of(plain, number), "loss")
            for side, array in zip((plain, streamed), arrays, strict=True):
                next(iter(side.model.parameters())).norm()  # waits for the update
                array[:] *= 0.5
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


@pytest.mark.daily("all")
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
        side.session = session = open_on_disk(model, side.optimizer, device=device, **settings)  # type: ignore[arg-type]
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
