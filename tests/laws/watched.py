"""Ways to train, to save and to generate, each of them watched by the checker of happens_before.py."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from stormtorch.checkpoint.files import disk
from stormtorch.session.api import Session
from stormtorch.streams.settings import Settings, Trial
from stormtorch.streams.units import placement
from stormtorch.streams.units.sizes import homes_for

from . import test_large_tables as tables
from .checker import Checker, Wait
from .happens_before import checking
from .models import OTHERS, Case, Chain, adamw, cross_entropy, tight, tokens, train
from .test_checkpoint_background import Brake

OTHER = {case.name: case for case in OTHERS}
SHORT = Case("short", lambda: Chain(blocks=5), tokens, cross_entropy)
UNTIED = Case("untied", lambda: Spoken(tied=False), tables.tokens, cross_entropy)
TIED = Case("tied", lambda: Spoken(tied=True), tables.tokens, cross_entropy)
MANY = Case("many", lambda: Chain(blocks=10), tokens, cross_entropy)
ROOM = 100_000  # for activations: less than they need


class Spoken(Chain):
    """Blocks between the tables of a large vocabulary."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__(blocks=6, width=tables.WIDTH)
        self.embed = nn.Embedding(tables.VOCABULARY, tables.WIDTH)
        self.head = nn.Linear(tables.WIDTH, tables.VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class Way(NamedTuple):
    """How a model is trained."""

    step: str = "forward"
    share: float = 0.5  # of the updates that are done on the device
    accumulate: int = 1
    clip: str = "off"
    poison: bool = False  # which orders some work that nothing else does
    vram: object = "tight"
    kept: int = 0
    ahead: bool = False
    activations: str = "keep"
    optimizers: Any = adamw
    dtype: torch.dtype = torch.float32
    look: tuple[int, ...] = ()
    steps: int = 3
    disk: float = 0.0  # of the units, whose states lie in files
    weights: float = 0.0  # of the units, whose weights lie there too

    def __str__(self) -> str:
        changed = {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}
        return "-".join(getattr(value, "__name__", str(value)) for value in changed.values()) or "forward"


def trained(case: Case, way: Way = Way(), missing: Wait | None = None) -> Checker:  # noqa: B008
    """Train, and read weights and states at the end."""
    model = case.build(way.dtype)
    optimizer, budget = way.optimizers(model), tight(model) if way.vram == "tight" else way.vram
    if way.kept and isinstance(budget, int):
        budget += 32 * sum(p.numel() + 512 for p in model.parameters())
    room = None if way.activations == "keep" else ROOM
    trial = Trial(
        poison=way.poison,
        kept=way.kept,
        ahead=way.ahead,
        device_share=way.share,
        activation_room=room,
        small_bytes=1,
        disk_part=way.disk,
        weights_part=way.weights,
    )
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if way.disk else None
        settings = Settings(vram=budget, device="cpu", step=way.step, activations=way.activations, disk=folder)
        checker = stack.enter_context(checking(missing))
        session = stack.enter_context(Session(model, optimizer, settings, trial=trial))
        train(
            case, model, optimizer, steps=way.steps, accumulate=way.accumulate, clip=way.clip, session=session,
            look=way.look,
        )  # fmt: skip
    return checker


def skipped(missing: Wait | None = None) -> Checker:
    """Drop gradients with which backward has begun updates ahead."""
    model = SHORT.build()
    optimizer = adamw(model)
    settings = Settings(vram=tight(model), device="cpu")
    with (
        checking(missing) as checker,
        Session(model, optimizer, settings, trial=Trial(device_share=0.0, ahead=True)) as session,
    ):
        for number in range(5):
            SHORT.loss(model, tokens(number)).backward()
            if number != 3:
                optimizer.step()
            optimizer.zero_grad()
        assert session._parts.adam is not None
        assert session._parts.adam.ahead.taken_over
    return checker


SUMS = Way(accumulate=2, clip="session", steps=2)


def saved(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, states: Path | None = None, held_s: float | None = None
) -> Checker:
    """Save in the background, and train two steps before the disk writes a thing. ``states``: where those of every
    unit lie; a step then waits until they are saved, so the disk must write after ``held_s``."""
    brake = Brake(free=1)
    monkeypatch.setattr(disk, "CALLS", disk.DiskCalls(pwrite=brake.write))
    model = SHORT.build()
    optimizer = adamw(model)
    settings = Settings(vram=tight(model), device="cpu", disk=states)
    trial = Trial(device_share=0.5, disk_part=0.0 if states is None else 1.0)
    with checking() as checker, Session(model, optimizer, settings, trial=trial) as session:
        if held_s is not None:
            threading.Timer(held_s, brake.go.set).start()
        try:
            for number in range(3):
                SHORT.loss(model, tokens(number)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if number == 0:
                    session.save(path, wait=False)
        finally:
            brake.go.set()
    return checker


def generated(name: str, missing: Wait | None = None) -> Checker:
    """Call a model of fused experts, for few tokens and for many, and write its weights in between."""
    from . import test_fused_experts as fused  # which needs transformers

    model = fused.made(name)
    settings = Settings(vram=int(sum(p.nbytes for p in model.parameters()) * 0.75), device="cpu")
    by_rows, trial = 0, Trial(small_bytes=512)
    with checking(missing) as checker, torch.no_grad(), Session(model, None, settings, trial=trial) as session:
        for number, length in enumerate([20, 1, 1, 20, 1]):
            model(fused.tokens(number, length))
            by_rows += any(r.stay and r.stay.rows for r in session._parts.parameters.residences)
            if number == 2:
                for layer in model.model.layers:
                    layer.mlp.experts.down_proj.mul_(0.5)
    assert by_rows
    return checker


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """These machines have RAM for all gradients."""
    monkeypatch.setattr("stormtorch.session.resources.homes_for", functools.partial(homes_for, always_ring=True))


@pytest.fixture
def small_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "headroom", lambda limit: limit // 50)
