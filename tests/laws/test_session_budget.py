"""``vram`` holds for all of a session: weights on their way, states, gradients and activations, from the first step on.

On a device that counts (counting.py), with a link as fast as a test wants it. What a loop that checkpoints its blocks
needs is enough for every mode."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stormtorch.core.sizes import MiB, format_bytes
from stormtorch.planner import online as tuning
from stormtorch.session.api import Session
from stormtorch.streams.activations.plans import profiles
from stormtorch.streams.settings import Settings, Trial
from stormtorch.streams.units import placement

from ..thinning import daily
from .counting import Counting
from .models import one_thread  # noqa: F401  # a fixture
from .test_activation_budget import Layer, Net

STEPS = (
    10  # plans are made before the third pass, the fourth and the eighth; the pool grows after the second, the fourth
)
WIDTH, BLOCKS, ROWS = 32, 5, (4, 48)


@pytest.fixture
def small_scale(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """What is left alone of a budget has a least size that is more than all of ours; and the link's rate, as wanted."""
    monkeypatch.setattr(placement, "headroom", lambda limit: limit // 50)

    def with_rate(rate: float) -> None:
        monkeypatch.setattr(tuning, "link_rates", lambda _totals: (rate, rate))

    return with_rate


def train(
    vocabulary: int,
    vram: int,
    *,
    mode: str,
    step: str,
    checkpointed: bool = False,
    width: int = WIDTH,
    blocks: int = BLOCKS,
    rows: tuple[int, int] = ROWS,
    lost_part: Callable[[], float] = lambda: 0.0,
    steps: int = STEPS,
) -> tuple[list[int], list[torch.Tensor], str]:
    """Peaks of each step, losses, and what became of activations."""
    torch.manual_seed(0)
    peaks, losses = [], []
    with Counting(lost_part=lost_part) as meter:
        model = Net(Layer, width, blocks, vocabulary)
        model.checkpointed = checkpointed
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        settings = Settings(vram=vram, device="cpu", activations=mode, step=step)
        with Session(model, optimizer, settings, trial=Trial(meter=meter, small_bytes=2048)) as session:
            for number in range(steps):
                given = torch.randint(0, vocabulary, rows, generator=torch.Generator().manual_seed(number))
                meter.forget_peak()
                loss = model(given)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                peaks.append(meter.peak())
                losses.append(loss.detach())
            reason = session.report().plan.activations.reason
    return peaks, losses, reason


@pytest.mark.parametrize(
    ("vocabulary", "rate"),
    [pytest.param(64, 2e6, marks=pytest.mark.wide), (2048, 2e8)],
    ids=["small_loss_slow", "large_loss_fast"],
)
def test_what_checkpointing_needs_is_enough(vocabulary: int, rate: float, small_scale: Callable[[float], None]) -> None:
    small_scale(rate)
    peaks, expected, _ = train(vocabulary, 16 * MiB, mode="keep", step="forward", checkpointed=True)
    limit = round(max(peaks) * 1.05)
    for mode, step in [("auto", "forward"), ("auto", "backward"), ("recompute", "forward")][: daily(1, 3)]:
        peaks, losses, reason = train(vocabulary, limit, mode=mode, step=step)
        shown = ", ".join(f"{peak / limit:.3f}" for peak in peaks)
        assert max(peaks) <= limit * 1.01, f"{mode}, {step}: {shown} of {limit / MiB:.2f} MiB; {reason}"
        assert all(torch.equal(*pair) for pair in zip(losses, expected, strict=True)), f"{mode}, {step}"


@pytest.mark.parametrize("limit_mib", [56, 60])
@pytest.mark.daily("56")
def test_what_is_taken_between_two_steps(limit_mib: int, small_scale: Callable[[float], None]) -> None:
    """The pool grows after the second step, and then a loop loads its next batch, and the peak is a little higher than
    the pool. The blocks of the third pass must not be given the bytes that the pool has taken."""
    small_scale(2e8)
    torch.manual_seed(0)
    peaks: list[str] = []
    with Counting() as meter:
        model = Net(Layer, 128, 6, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        settings = Settings(vram=limit_mib * MiB, device="cpu")
        with Session(model, optimizer, settings, trial=Trial(meter=meter, small_bytes=2048)) as session:
            for _ in range(STEPS):
                given = torch.randint(0, 64, (8, 64))
                model(given).backward()
                optimizer.step()
                optimizer.zero_grad()
                peaks.append(f"{meter.peak() / MiB:.1f}")
                batch = torch.zeros(MiB // 4)
                del batch
            reason = session.report().plan.activations.reason
    assert meter.peak() <= limit_mib * MiB * 1.01, f"{', '.join(peaks)} of {limit_mib} MiB; {reason}"


@pytest.mark.parametrize("late", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_a_host_that_runs_ahead_of_the_device(
    late: int, small_scale: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that never looks at its losses is steps ahead: what was measured is not known when the third pass begins.
    Blocks go on as before then, and the pool gets what is left when there is a plan."""
    small_scale(2e6)
    size: Any = {"blocks": 16, "rows": (16, 48)}
    peaks, expected, _ = train(64, 64 * MiB, mode="keep", step="forward", checkpointed=True, **size)
    limit = round(max(peaks) * 0.8)
    asked: dict[int, int] = collections.Counter()
    profile = profiles._Known.profile

    def later(known: profiles._Known, repeatable: bool) -> Any:
        asked[id(known)] += 1
        return profile(known, repeatable) if asked[id(known)] > late else None

    monkeypatch.setattr(profiles._Known, "profile", later)
    peaks, losses, reason = train(64, limit, mode="auto", step="forward", **size)
    assert max(asked.values()) > late
    shown = ", ".join(f"{peak / limit:.3f}" for peak in peaks)
    assert max(peaks) <= limit * 1.01, f"{shown} of {limit / MiB:.2f} MiB; {reason}"
    assert all(torch.equal(*pair) for pair in zip(losses, expected, strict=True))


@pytest.mark.parametrize(
    "known_after", [pytest.param(0, marks=pytest.mark.wide), 1], ids=["from_the_start", "when_seen"]
)
def test_what_holes_would_take_is_left_alone(known_after: int, small_scale: Callable[[float], None]) -> None:
    """Also if STORM sees it only after its first question, at the opening of the session."""
    small_scale(2e6)
    asked = itertools.count()
    many = 15  # a plan that keeps what it can has been tried by then
    peaks, expected, _ = train(64, 16 * MiB, mode="keep", step="forward", checkpointed=True, steps=many)
    limit = round(max(peaks) * 1.8)
    whole, _, _ = train(64, limit, mode="auto", step="forward", steps=many)
    assert max(whole) > 0.85 * limit  # or there would be nothing to leave alone
    peaks, losses, reason = train(
        64, limit, mode="auto", step="forward", lost_part=lambda: 0.2 * (next(asked) >= known_after), steps=many
    )
    shown = ", ".join(f"{peak / limit:.3f}" for peak in peaks)
    assert max(peaks) <= limit * 0.81, f"{shown} of {limit / MiB:.2f} MiB; {reason}"
    assert all(torch.equal(*pair) for pair in zip(losses, expected, strict=True))


@pytest.mark.parametrize(
    ("rows", "share"),
    [pytest.param((48, 48), 0.8, marks=pytest.mark.wide), ((12, 48), 0.65)],
    ids=["long", "short"],
)
def test_a_loop_that_checkpoints_by_itself_may_need_more_than_there_is(
    rows: tuple[int, int], share: float, small_scale: Callable[[float], None]
) -> None:
    """What its checkpoints keep leaves, from the first pass on, as far as there is no room for it; be the weights that
    are there much of the budget ("short"), so that it looks tight from the start, or not."""
    small_scale(2e8)
    size: Any = {"width": 16, "blocks": 12, "rows": rows, "checkpointed": True}
    peaks, expected, _ = train(64, 64 * MiB, mode="keep", step="forward", **size)
    limit = round(max(peaks) * share)
    peaks, losses, reason = train(64, limit, mode="auto", step="forward", **size)
    shown = ", ".join(f"{peak / limit:.3f}" for peak in peaks)
    assert max(peaks) <= limit * 1.01, f"{shown} of {limit / MiB:.2f} MiB; {reason}"
    assert all(torch.equal(*pair) for pair in zip(losses, expected, strict=True))


def test_who_goes_over_the_budget_is_told(
    small_scale: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A loss that takes more than there is cannot leave."""
    small_scale(2e8)
    size: Any = {"blocks": 2, "rows": (8, 48)}
    peaks, _, _ = train(2048, 64 * MiB, mode="auto", step="forward", **size)
    assert not caplog.messages
    limit = round(max(peaks) * 0.6)
    peaks, _, _ = train(2048, limit, mode="auto", step="forward", **size)
    assert len(caplog.messages) == 1
    assert f"has taken {format_bytes(peaks[6])} of the device" in caplog.text
    assert f"allows {format_bytes(limit)}" in caplog.text
