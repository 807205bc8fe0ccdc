"""Law: a vocabulary's table, ten times as large as a block, passes through a pool for one table and a block, in full
and with sums of micro-batches; every number is plain PyTorch's."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch.core.tags import Tier
from stormtorch.memory.lanes.lane import Delay
from stormtorch.native.worker.jobs import Worker
from stormtorch.native.worker.python_worker import PythonThread
from stormtorch.session.api import Session
from stormtorch.streams.gradients.buckets import Buckets
from stormtorch.streams.settings import Settings, Trial
from stormtorch.streams.units.sizes import homes_for

from ..thinning import daily
from .models import (
    Case,
    Llama,
    adamw,
    adapt,
    cross_entropy,
    gradients,
    jitter,
    one_thread,  # noqa: F401  # a fixture
    same,
    sgd,
    train,
)

CPU = torch.device("cpu")
VOCABULARY, WIDTH, ROWS, LENGTH = 4096, 32, 4, 8
TABLE = 4 * VOCABULARY * WIDTH
FLOOR = int(1.6 * TABLE)  # before: four tables, and eight for sums
LOOK = {"forward": (0, 1), "backward": ()}  # steps whose gradients are read: an update in backward uses them up


class Spoken(Llama):
    """A Llama with a large vocabulary."""

    def __init__(self, *, tied: bool = False, recompute: bool = False) -> None:
        super().__init__(recompute=recompute)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def tokens(step: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


UNTIED = Case("untied", Spoken, tokens, cross_entropy)
TIED = Case("tied", lambda: Spoken(tied=True), tokens, cross_entropy)
LORA = Case("lora", lambda: adapt(Spoken()), tokens, cross_entropy)
RECOMPUTED = Case("recomputed", lambda: Spoken(recompute=True), tokens, cross_entropy)


def streamed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    vram: int = FLOOR,
    delay: Delay | None = None,
    share: float = 0.5,
    device: torch.device = CPU,
    **settings: Any,
) -> Session:
    """With lanes that are late at random, poison, and half of the updates on the device where it has room."""
    trial = Trial(delay=delay or jitter(device, 0), poison=True, device_share=share)
    return Session(model, optimizer, Settings(vram=vram, device=str(device), **settings), trial=trial)


@pytest.mark.parametrize("clip", ["off", "torch", "session"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("case", [UNTIED, TIED, LORA, RECOMPUTED], ids=lambda case: case.name)
def test_a_loop_gives_the_numbers_of_plain_pytorch(case: Case, accumulate: int, clip: str) -> None:
    model, twin = case.build(), case.build()
    optimizer, plain = adamw(model), adamw(twin)
    loop = functools.partial(train, case, steps=daily(3, 4), accumulate=accumulate, clip=clip, look=(1, 2))
    with streamed(model, optimizer) as session:
        assert session.plan.pool.bucket_bytes < TABLE // 4
        history = loop(model, optimizer, session=session)
        assert session.ledger.peak_bytes(Tier.DEVICE) <= FLOOR
    history.check(loop(twin, plain, norms=history.norms))


@pytest.mark.parametrize("optimizers", [adamw, sgd])
@pytest.mark.parametrize("step", ["backward", "serial"])
def test_so_does_each_way_to_step(step: str, optimizers: Any) -> None:
    model, twin = UNTIED.build(), UNTIED.build()
    optimizer, plain = optimizers(model), optimizers(twin)
    with streamed(model, optimizer, step=step):
        history = train(UNTIED, model, optimizer, steps=4)
    history.check(train(UNTIED, twin, plain, steps=4))


@pytest.mark.parametrize(("step", "accumulate"), [("forward", 1), ("forward", 3), ("backward", 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", [UNTIED, TIED], ids=lambda case: case.name)
def test_parts_give_the_numbers_of_one_piece(
    device: torch.device, case: Case, dtype: torch.dtype, accumulate: int, step: str
) -> None:
    """On a GPU the lanes' order shows. Sums for bf16 weights are in fp32, which plain PyTorch's are not."""
    found = []
    floor = FLOOR * dtype.itemsize // 4
    for vram in (floor, 64 * TABLE):
        model = case.build(dtype)
        optimizer = adamw(model)
        with streamed(model, optimizer, vram=vram, device=device, step=step) as session:
            assert (session.plan.pool.bucket_bytes < TABLE // 8 * dtype.itemsize // 2) == (vram == floor)
            found.append(train(case, model, optimizer, steps=3, accumulate=accumulate, device=device, look=LOOK[step]))
    found[0].check(found[1])


@pytest.mark.parametrize("clip", ["torch", "session"])
def test_norms_of_sums_in_bf16(clip: str) -> None:
    found = []
    for vram in (FLOOR // 2, 64 * TABLE):
        model = TIED.build(torch.bfloat16)
        optimizer = adamw(model)
        with streamed(model, optimizer, vram=vram) as session:
            assert (session.plan.pool.bucket_bytes < TABLE // 8) == (vram < TABLE)
            found.append(train(TIED, model, optimizer, steps=3, accumulate=3, clip=clip, session=session, look=(0, 1)))
    found[0].check(found[1])


class Late(PythonThread):
    """A worker that begins each update late."""

    def _run_one(self) -> bool:
        if self.jobs:
            time.sleep(4e-3)
        return super()._run_one()


@pytest.mark.parametrize("late", ["store", "load", "worker"])
def test_the_order_holds_where_one_is_always_late(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def delay() -> None:
        if late in threading.current_thread().name:
            time.sleep(1e-3)

    if late == "worker":
        monkeypatch.setattr("stormtorch.session.build.open_worker", lambda: Worker(Late(threads=1)))
    model, twin = UNTIED.build(), UNTIED.build()
    optimizer, plain = adamw(model), adamw(twin)
    with streamed(model, optimizer, delay=delay, share=0.0):
        history = train(UNTIED, model, optimizer, steps=3, accumulate=2)
    history.check(train(UNTIED, twin, plain, steps=3, accumulate=2))


def test_user_code_may_hold_and_write_gradients_that_went_in_parts() -> None:
    model, twin = TIED.build(), TIED.build()
    optimizer, plain = adamw(model), adamw(twin)
    with streamed(model, optimizer):
        for step in range(3):
            held = []
            for side in (model, twin):
                cross_entropy(side, tokens(step)).backward()
                gradient = side.get_parameter("embed.weight").grad
                assert gradient is not None
                if step == 1:
                    gradient.mul_(3)
                cross_entropy(side, tokens(step + 9)).backward()
                held.append(gradient.clone())
                nn.utils.clip_grad_norm_(side.parameters(), 0.1)
            same(held[0], held[1], "the gradient that was held")
            same(gradients(model), gradients(twin), "gradients")
            for updater in (optimizer, plain):
                updater.step()
                updater.zero_grad()
        same(model.state_dict(), twin.state_dict(), "weights")


def test_an_error_between_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store lane is late: what user code writes next must not be overwritten by parts that were on their way."""

    def delay() -> None:
        if "store" in threading.current_thread().name:
            time.sleep(0.02)

    def interrupted(buckets: Buckets, size: int, **flags: bool) -> torch.Tensor:
        calls.append(size)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return lend(buckets, size, **flags)

    model = UNTIED.build()
    optimizer = adamw(model)
    weight: Any = model.get_parameter("head.weight")
    lend, calls = Buckets.lend, list[int]()
    with streamed(model, optimizer, delay=delay) as session:
        cross_entropy(model, tokens(0)).backward()
        monkeypatch.setattr(Buckets, "lend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cross_entropy(model, tokens(1)).backward()
        monkeypatch.undo()
        same(nn.utils.get_total_norm([weight.grad]), weight.grad.clone().norm(), "its norm")
        weight.grad = torch.full_like(weight, 7)
        session.synchronize()
        time.sleep(0.1)
        assert bool((weight.grad == 7).all())


class Crossed(Spoken):
    """Autograd makes the gradient of its head column by column."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return torch.einsum("bld,vd->blv", x, self.head.weight)


def test_gradients_with_other_strides_than_their_parameters() -> None:
    case = Case("crossed", Crossed, tokens, cross_entropy)
    model, twin = case.build(), case.build()
    optimizer, plain = adamw(model), adamw(twin)
    with streamed(model, optimizer):
        history = train(case, model, optimizer, steps=4, clip="torch")
    history.check(train(case, twin, plain, steps=4, clip="torch", norms=history.norms))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_table_passes_through_the_ring_whoever_updates(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no RAM for the table's gradients as a whole, nor does the device take them."""
    always = functools.partial(homes_for, always_ring=True)
    monkeypatch.setattr("stormtorch.session.resources.homes_for", always)
    model, twin = UNTIED.build(), UNTIED.build()
    optimizer, plain = adamw(model), adamw(twin)
    with streamed(model, optimizer, vram=int(2.5 * TABLE), share=share, step="backward") as session:
        assert session.plan.pool.bucket_bytes < TABLE // 4
        history = train(UNTIED, model, optimizer, steps=3)
        memory: Any = session._parts.schedule.gradients.memory
        assert memory.is_ring
        assert not memory._own, "gradients have taken RAM of their own"
    history.check(train(UNTIED, twin, plain, steps=3))


def test_sums_of_a_unit_whose_states_stay_on_the_device() -> None:
    """The sum is in fp32, and has no room beside the states."""
    model, roomy = UNTIED.build(torch.bfloat16), UNTIED.build(torch.bfloat16)
    found = []
    for side, vram in ((model, int(4.5 * TABLE)), (roomy, 64 * TABLE)):
        optimizer = adamw(side)
        given = Settings(vram=vram, device="cpu", activations="keep")
        with Session(side, optimizer, given, trial=Trial(kept=1, poison=True)):
            found.append(train(UNTIED, side, optimizer, steps=3, accumulate=3))
    found[0].check(found[1])
