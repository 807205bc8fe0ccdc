"""A block that is recomputed is loaded as often as one that is not: once for forward and once for backward at most."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stormtorch.session.api import Session
from stormtorch.streams.settings import Settings

from ..laws.models import CHAIN, LLAMA, RECOMPUTED, Case, adamw, one_thread, tight  # noqa: F401  # a fixture


def loads(case: Case, activations: str, *, step: str = "forward") -> tuple[list[int], int]:
    """The loads of each of the last steps, and how many of all steps' but the first two were not prefetched."""
    model: nn.Module = case.build()
    optimizer = adamw(model)
    counts, missed = list[int](), list[int]()
    settings = Settings(vram=tight(case.build()), device="cpu", step=step, activations=activations)
    with Session(model, optimizer, settings) as session:
        for number in range(6):
            case.loss(model, case.batch(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
            report = session.report()
            counts.append(report.loads)
            missed.append(report.misses)
    return [b - a for a, b in zip(counts[1:], counts[2:], strict=False)], missed[-1] - missed[1]


@pytest.mark.parametrize("step", ["forward", "backward"])
@pytest.mark.parametrize("case", [LLAMA, CHAIN], ids=lambda case: case.name)
def test_as_often_as_blocks_that_are_kept(case: Case, step: str) -> None:
    kept, _ = loads(case, "keep", step=step)
    recomputed, missed = loads(case, "recompute", step=step)
    assert min(kept) >= 8, "nothing streams"
    assert max(recomputed) <= max(kept)
    assert missed == 0


def test_checkpoints_of_the_users_too() -> None:
    kept, _ = loads(LLAMA, "keep")
    recomputed, missed = loads(RECOMPUTED, "keep")
    assert max(recomputed) <= max(kept)
    assert missed == 0


def test_two_passes_a_step() -> None:
    """A unit's use in the next pass is not taken for the one that follows its recomputation."""
    torch.manual_seed(0)
    model = LLAMA.build()
    optimizer = adamw(model)
    settings = Settings(vram=tight(LLAMA.build()), device="cpu", activations="recompute")
    with Session(model, optimizer, settings) as session:
        for number in range(5):
            before = session.report().misses
            for part in range(2):
                LLAMA.loss(model, LLAMA.batch(2 * number + part)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.report().misses == before
