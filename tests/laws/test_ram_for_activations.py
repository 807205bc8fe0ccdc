"""``ram`` is a hard limit for activations too, and never a reason to fail where running blocks again would do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from stormtorch.core.errors import OutOfBudget
from stormtorch.core.sizes import GiB, MiB
from stormtorch.core.tags import Tag, Tier
from stormtorch.session.api import Session
from stormtorch.session.offload import OffloadedActivations
from stormtorch.streams.activations.plans.plan import OFFLOAD, RECOMPUTE
from stormtorch.streams.settings import Settings, Trial

from .counting import Counting
from .models import one_thread, same  # noqa: F401  # a fixture
from .test_activation_budget import NARROW, PASSES, Half, Layer, Net

RAMS = {"none": 4096, "little": 100_000, "plenty": GiB}


@pytest.mark.parametrize("ram", RAMS)
@pytest.mark.parametrize("block", [Half, Layer], ids=["halves", "layers"])
def test_training_goes_on_when_ram_is_short(block: type[nn.Module], ram: str) -> None:
    """Within the VRAM that checkpoints need. What a block would send is dropped, and the block runs again."""
    torch.manual_seed(0)
    with Counting() as meter:
        model, given = Net(block, 32, 6), torch.randn(8, 32, 32)
        model(given).backward()
        expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.checkpointed = True
        model.zero_grad()
        meter.forget_peak()
        model(given).backward()
        limit, model.checkpointed = meter.peak(), False
        model.zero_grad()
        trial = Trial(meter=meter, small_bytes=2048)
        activations = OffloadedActivations(model, "auto", limit, RAMS[ram], "cpu", trial=trial)
        meter.forget_peak()
        for step in range(PASSES):
            with activations:
                loss = model(given)
            loss.backward()
            same([parameter.grad for parameter in model.parameters()], expected, f"pass {step}")
            model.zero_grad()
        assert activations.ledger.peak_bytes(Tier.HOST) <= RAMS[ram]
        activations.close()
        assert meter.peak() <= limit * NARROW


def test_a_streamed_model_has_the_ram_that_its_weights_and_states_leave() -> None:
    torch.manual_seed(0)
    model, given = Net(Layer, 32, 6), torch.randn(8, 32, 32)
    state_bytes = 16 * sum(parameter.numel() for parameter in model.parameters())
    losses = []
    with Counting() as meter:
        model(given).backward()
        limit = meter.peak()
        model.zero_grad()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        settings = Settings(vram=limit, ram=state_bytes + 192 * 1024, device="cpu")
        with Session(model, optimizer, settings, trial=Trial(meter=meter, small_bytes=2048)) as session:
            for _ in range(PASSES):
                loss = model(given)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            session.ledger.check()
            used = [b.peak_bytes for b in session.ledger.balances() if b.tag is Tag.ACTIVATIONS and b.tier is Tier.HOST]
            assert sum(used) <= 192 * 1024
    assert losses[-1] < losses[0]


def test_what_the_user_wants_offloaded_is_an_error() -> None:
    model, given = Net(Half, 32, 4), torch.randn(256, 32)
    activations = OffloadedActivations(model, "offload", 16 * MiB, 100_000, "cpu", trial=Trial(small_bytes=2048))
    with pytest.raises(OutOfBudget, match=r"on the host for ACTIVATIONS .* ram=100000"), activations:
        model(given)
    activations.close()


def test_ram_that_the_plan_does_not_need_is_given_back() -> None:
    """Inputs of blocks leave in the first passes, when it is not known yet what the loss takes; later they stay."""
    torch.manual_seed(0)
    with Counting() as meter:
        model, given = Net(Layer, 32, 6, 64), torch.randint(0, 64, (8, 32))
        model(given).backward()
        model.zero_grad()
        trial = Trial(meter=meter, small_bytes=2048)
        limit = 6 * meter.peak()
        kept = torch.empty(round(0.4 * limit), dtype=torch.uint8)  # by the user: the device seems to fill at once
        activations = OffloadedActivations(model, "recompute", limit, GiB, "cpu", trial=trial)
        used = []
        for _ in range(8):
            with activations:
                loss = model(given)
            loss.backward()
            del loss
            model.zero_grad()
            used.append(activations.ledger.used_bytes(Tier.HOST, Tag.ACTIVATIONS))
        plan = activations.saving.plan
        activations.close()
        del kept
    assert plan is not None
    assert OFFLOAD not in plan.blocks
    assert max(used) > 0, "nothing left in the first passes, so there was nothing to give back"
    assert used[-1] == 0


class Gated(nn.Module):
    """Its last operation saves more than its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.one(x) * self.two(x)
        return product


def test_what_the_last_operation_saves_counts_too() -> None:
    """RAM has no room for it: the block runs again, and nothing of it remains on the device."""
    torch.manual_seed(0)
    after = {}
    with Counting() as meter:
        model, given = Net(Gated, 32, 6), torch.randn(8, 32, 32)
        ram = given.nbytes + 4096  # for the input of the first block
        activations = OffloadedActivations(model, "auto", GiB, ram, "cpu", trial=Trial(meter=meter, small_bytes=2048))
        for _ in range(4):
            with activations:
                loss = model(given)
            loss.backward()
        plan = activations.saving.plan
        assert plan is not None
        assert len(plan.blocks) == 6
        for kind in (RECOMPUTE, OFFLOAD):
            activations.saving.planning.plan = replace(plan, blocks=[kind] * 6, way_bytes=[0] * 7)
            del loss
            before = meter.allocated()
            with activations:
                loss = model(given)
            after[kind.kind] = meter.allocated() - before
            loss.backward()
        activations.close()
    assert after["offload"] <= after["recompute"]
