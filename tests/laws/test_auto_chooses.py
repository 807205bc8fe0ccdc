"""``activations="auto"`` begins with recomputing, and goes beyond it only as long as steps are faster that way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from stormtorch.core.sizes import GiB
from stormtorch.session.offload import OffloadedActivations
from stormtorch.streams.activations import planning
from stormtorch.streams.activations.plans.plan import KEEP, RECOMPUTE
from stormtorch.streams.settings import Trial

from .counting import Counting
from .models import one_thread  # noqa: F401  # a fixture
from .test_activation_budget import NARROW, Layer, Net

PASSES = 46  # the comparison of plans takes 24, from the eighth on


def trained(monkeypatch: pytest.MonkeyPatch, cost_of_keeping: float) -> tuple[list[int], str, float]:
    """How many of 6 blocks were kept in each pass, why in the end, and the peak in parts of the budget. A step takes
    1 s, and so much more or less for each block that is kept."""
    clock = [0.0]
    monkeypatch.setattr(planning, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    torch.manual_seed(0)
    kept = []
    with Counting() as meter:
        model, given = Net(Layer, 32, 6, 64), torch.randint(0, 64, (8, 48))
        model.checkpointed = True
        model(given).backward()
        recomputed, model.checkpointed = meter.peak(), False
        model.zero_grad()
        meter.forget_peak()
        model(given).backward()
        limit = (recomputed + meter.peak()) // 2  # between what checkpoints need and what keeping all does
        model.zero_grad()
        trial = Trial(meter=meter, small_bytes=1 << 30)  # nothing is worth sending
        activations = OffloadedActivations(model, "auto", limit, GiB, "cpu", trial=trial)
        meter.forget_peak()
        for _ in range(PASSES):
            with activations:
                plan = activations.saving.plan
                loss = model(given)
            loss.backward()
            model.zero_grad()
            kept.append(0 if plan is None else plan.blocks.count(KEEP))
            clock[0] += 1 + cost_of_keeping * kept[-1]
        reason, top = activations.report().reason, meter.peak() / limit
        activations.close()
    return kept, reason, top


def test_what_is_faster_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, reason, top = trained(monkeypatch, -0.05)
    assert kept[:7] == [0] * 7
    assert min(kept[-10:]) > 0
    assert "of the time" in reason
    assert top <= NARROW


def test_what_is_slower_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, reason, top = trained(monkeypatch, 0.05)
    assert max(kept) > 0, "nothing was tried"
    assert kept[-10:] == [0] * 10
    assert "took 1." in reason
    assert top <= NARROW


def test_recomputing_tries_nothing() -> None:
    model, given = Net(Layer, 32, 4), torch.randn(4, 48, 32)
    activations = OffloadedActivations(
        model, "recompute", GiB, GiB, "cpu", trial=Trial(activation_room=10**9, small_bytes=2048)
    )
    for _ in range(PASSES):
        with activations:
            loss = model(given)
            plan = activations.saving.plan
        loss.backward()
    assert plan is not None
    assert plan.blocks == [RECOMPUTE] * 4
    activations.close()
